//! The clock of the SMs, read on the device itself: no privileges needed, and no guess about when a reading
//! was taken.
//!
//! A tiny kernel writes the device's wall clock (`%globaltimer`, nanoseconds) and an SM's cycle counter
//! (`clock64`). Two of them, before and after some work, give cycles per nanosecond over that work.

use std::ffi::c_void;

use evosdpa_kernels::LaunchGeometry;

use crate::{ArtifactKind, CompileRequest, Compiler, Device, DeviceBuffer, PreparedLaunch, Result, Stream};

/// The counter differs between SMs, so only number 0 writes, and of its blocks only the first. The wall clock
/// moves in steps of up to a microsecond: the counter is read right after a step.
const SOURCE: &str = r#"
struct Stamp { unsigned long long time_ns, cycles; unsigned taken, reserved; };
extern "C" __global__ void stamp(Stamp* out) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (sm != 0 || threadIdx.x != 0 || atomicExch(&out->taken, 1u) != 0) return;
  unsigned long long before, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(before));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now == before);
  out->cycles = clock64();
  out->time_ns = now;
}
"#;

/// Bytes of a stamp.
const STAMP_BYTES: u64 = 24;

/// Two stamps and the kernel that writes them.
#[derive(Debug)]
pub struct ClockProbe {
    stamp: PreparedLaunch,
    stamps: DeviceBuffer,
}

impl ClockProbe {
    /// Compiles the kernel for the device.
    pub fn new(device: &Device) -> Result<Self> {
        let target = device.target()?;
        let request = CompileRequest {
            label: "clock probe".to_owned(),
            file_name: "clock_probe.cu".to_owned(),
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            target: target.arch.name().to_owned(),
            kind: ArtifactKind::Cubin,
            options: vec![format!("--gpu-architecture={}", target.arch.name()), "-std=c++17".to_owned()],
        };
        let compiled = Compiler::open()?.compile(&request)?;
        let function = device.load(&compiled.code, &request.label)?.function("stamp")?;
        // Enough blocks that every SM of an idle device gets one.
        let geometry = LaunchGeometry {
            grid: [2 * target.sm_count, 1, 1],
            block: [32, 1, 1],
            cluster: [1; 3],
            dynamic_smem_bytes: 0,
            programmatic: false,
            counter: false,
            workspace_bytes: 0,
        };
        let stamp = PreparedLaunch::new(&function, geometry)?;
        Ok(Self { stamp, stamps: device.alloc(2 * STAMP_BYTES as usize)? })
    }

    /// Begins: what the stream is given from now on is inside.
    pub fn start(&self, stream: &Stream) -> Result<()> {
        self.stamps.fill(0, stream)?;
        self.write(0, stream)
    }

    /// Ends.
    pub fn stop(&self, stream: &Stream) -> Result<()> {
        self.write(1, stream)
    }

    /// Cycles per nanosecond between the two, once the stream has got there. `None` when a stamp was not written: other
    /// work kept SM 0 to itself.
    pub fn cycles_per_ns(&self) -> Result<Option<f64>> {
        let mut words = [0_u64; 6];
        self.stamps.copy_to(&mut words)?;
        let [start_ns, start_cycles, _, end_ns, end_cycles, _] = words;
        if start_ns == 0 || end_ns <= start_ns || end_cycles <= start_cycles {
            return Ok(None);
        }
        Ok(Some((end_cycles - start_cycles) as f64 / (end_ns - start_ns) as f64))
    }

    fn write(&self, which: u64, stream: &Stream) -> Result<()> {
        let mut address = self.stamps.address() + which * STAMP_BYTES;
        let argument: *mut c_void = (&raw mut address).cast();
        // SAFETY: the kernel takes one pointer, to a stamp in a buffer that lives as long as `self`; the driver copies the
        // argument during the call.
        unsafe { self.stamp.launch_arguments(stream, &mut [argument]) }
    }
}
