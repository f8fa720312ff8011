//! How many blocks of a kernel fit on one SM.
//!
//! Numbers from the table of compute capabilities in the CUDA programming guide; allocation granularities as in
//! NVIDIA's occupancy calculator.

use evosdpa_kernels::Arch;

struct Sm {
    warps: u32,
    blocks: u32,
    smem_bytes: u32,
}

/// All architectures here: four partitions with a quarter of 64 Ki registers each.
const PARTITIONS: u32 = 4;
const REGISTERS_PER_PARTITION: u32 = 16 * 1024;
const REGISTER_GRANULARITY_PER_WARP: u32 = 256;
const SMEM_GRANULARITY_BYTES: u32 = 128;
/// What the driver keeps of each block's shared memory.
const SMEM_RESERVED_BYTES: u32 = 1024;
const THREADS_PER_WARP: u32 = 32;

fn limits_of(arch: Arch) -> Sm {
    match arch {
        Arch::Sm80 => Sm { warps: 64, blocks: 32, smem_bytes: 164 * 1024 },
        Arch::Sm86 => Sm { warps: 48, blocks: 16, smem_bytes: 100 * 1024 },
        Arch::Sm89 => Sm { warps: 48, blocks: 24, smem_bytes: 100 * 1024 },
        Arch::Sm90a => Sm { warps: 64, blocks: 32, smem_bytes: 228 * 1024 },
    }
}

/// What keeps another block from fitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limiter {
    /// Registers.
    Registers,
    /// Shared memory.
    SharedMemory,
    /// Warps per SM.
    Warps,
    /// Blocks per SM.
    Blocks,
}

/// How a kernel fills an SM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    /// Blocks at once.
    pub blocks_per_sm: u32,
    /// Warps at once.
    pub warps_per_sm: u32,
    /// Warps at once, of what is possible.
    pub fraction: f64,
    /// What keeps another block from fitting.
    pub limiter: Limiter,
}

/// The occupancy of a kernel; `smem_bytes` is static and dynamic shared memory together.
pub fn occupancy(arch: Arch, threads_per_block: u32, registers: u32, smem_bytes: u32) -> Occupancy {
    let sm = limits_of(arch);
    let warps_per_block = threads_per_block.div_ceil(THREADS_PER_WARP).max(1);
    let registers_per_warp =
        (registers.max(1) * THREADS_PER_WARP).next_multiple_of(REGISTER_GRANULARITY_PER_WARP);
    let warps_by_registers = REGISTERS_PER_PARTITION / registers_per_warp * PARTITIONS;
    // A block's warps are dealt evenly over the partitions.
    let by_registers = warps_by_registers / warps_per_block.next_multiple_of(PARTITIONS);
    let smem_per_block =
        smem_bytes.saturating_add(SMEM_RESERVED_BYTES).next_multiple_of(SMEM_GRANULARITY_BYTES);
    // What nobody can change comes first, and is named when several limits are equal.
    let candidates = [
        (sm.warps / warps_per_block, Limiter::Warps),
        (sm.blocks, Limiter::Blocks),
        (sm.smem_bytes / smem_per_block, Limiter::SharedMemory),
        (by_registers, Limiter::Registers),
    ];
    let (blocks_per_sm, limiter) =
        candidates.into_iter().min_by_key(|(blocks, _)| *blocks).unwrap_or((0, Limiter::Blocks));
    let warps_per_sm = blocks_per_sm * warps_per_block;
    Occupancy {
        blocks_per_sm,
        warps_per_sm,
        fraction: f64::from(warps_per_sm) / f64::from(sm.warps),
        limiter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(arch: Arch, threads: u32, registers: u32, smem: u32) -> (u32, Limiter) {
        let occupancy = occupancy(arch, threads, registers, smem);
        (occupancy.blocks_per_sm, occupancy.limiter)
    }

    #[test]
    fn known_cases() {
        // 256 threads of 72 registers: 2304 a warp, 7 warps a partition, 28 an SM, 3 blocks of 8.
        assert_eq!(blocks(Arch::Sm89, 256, 72, 0), (3, Limiter::Registers));
        // 81 KiB and the reserved one leave no room for a second block.
        assert_eq!(blocks(Arch::Sm89, 256, 32, 81 * 1024), (1, Limiter::SharedMemory));
        assert_eq!(blocks(Arch::Sm90a, 256, 32, 81 * 1024), (2, Limiter::SharedMemory));
        // FlashAttention-3's shape: 384 threads of 168 registers.
        assert_eq!(blocks(Arch::Sm90a, 384, 168, 0), (1, Limiter::Registers));
        assert_eq!(blocks(Arch::Sm80, 1024, 32, 0), (2, Limiter::Warps));
        assert_eq!(blocks(Arch::Sm89, 32, 16, 0), (24, Limiter::Blocks));
        // The most a block can have on each.
        assert_eq!(blocks(Arch::Sm90a, 128, 64, 227 * 1024), (1, Limiter::SharedMemory));
        assert_eq!(blocks(Arch::Sm90a, 128, 64, 228 * 1024), (0, Limiter::SharedMemory));
        assert_eq!(blocks(Arch::Sm80, 128, 64, 163 * 1024), (1, Limiter::SharedMemory));
    }

    #[test]
    fn full_occupancy_is_one() {
        assert_eq!(occupancy(Arch::Sm90a, 256, 32, 0).fraction, 1.0);
        assert_eq!(occupancy(Arch::Sm89, 256, 40, 0).fraction, 1.0);
    }
}
