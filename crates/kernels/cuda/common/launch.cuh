// What a kernel says about its launch (sm_90): programmatic dependent launch, registers of its warpgroups.
#pragma once

// Programmatic dependent launch. Both do nothing when the launch does not ask for it.
// Until here a kernel may run while the one before it in the stream still does: no global memory before it.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel in the stream may be set up as soon as every CTA has said this.
__device__ __forceinline__ void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Register reallocation between warpgroups; every warp of the group executes it.
template <int REGISTERS>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
