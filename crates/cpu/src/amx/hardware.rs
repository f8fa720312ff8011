//! The processor's tile unit. Its intrinsics are not stable in Rust, so the instructions are written as assembly: a product is one piece of it, because
//! the compiler knows nothing of what tile registers hold between two.

use super::{Product, SIDE, TileUnit};
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// The tile unit of this processor.
#[derive(Clone, Copy)]
pub(crate) struct Hardware;

/// What is missing for tiles of bfloat16: the processor must have them, the system keep them, and let this process use them, which it is asked once.
pub(crate) fn lacks() -> Option<&'static str> {
    static LACKS: OnceLock<Option<&str>> = OnceLock::new();
    *LACKS.get_or_init(|| {
        if !has_tiles() {
            Some("AMX-TILE and AMX-BF16")
        } else if !keeps_tiles() {
            Some("a system that saves tile registers")
        } else if !is_permitted() {
            Some("the system's permission to use tile registers")
        } else {
            None
        }
    })
}

fn has_tiles() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (BF16 | TILE) == BF16 | TILE
}

/// Whether the system saves a thread's tile configuration and tiles when it takes the processor away.
fn keeps_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const CONFIGURATION_AND_TILES: u32 = 0b11 << 17;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: the system has enabled the instruction, which reads a register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    low & CONFIGURATION_AND_TILES == CONFIGURATION_AND_TILES
}

/// Tiles are 8 KB that a system would have to save for every thread: Linux wants to be asked, once for all threads of a process.
fn is_permitted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let outcome: i64;
    // SAFETY: the call reads no memory; a system that does not know it refuses.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => outcome, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            out("rcx") _, out("r11") _, options(nostack));
    }
    outcome == 0
}

/// What `ldtilecfg` reads: bytes of a row and rows of each tile register.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight registers at their full size.
static FULL_TILES: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl TileUnit for Hardware {
    unsafe fn enter() {
        // SAFETY: trait contract; the configuration is a valid one.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const FULL_TILES, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(readonly, nostack, preserves_flags));
        }
    }
    unsafe fn leave() {
        // SAFETY: trait contract.
        unsafe {
            asm!("tilerelease", out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _, options(nomem, nostack, preserves_flags));
        }
    }
    /// Sums are in registers 0 and 1, those of the second row of tiles in 2 and 3; the left operands in 4 and 5, the right ones in 6 and 7.
    #[inline(always)]
    unsafe fn multiply<const ROWS: usize, const COLUMNS: usize, const FRESH: bool>(a: &Product) {
        // SAFETY: trait contract.
        unsafe {
            let sums = a.sums;
            asm!(
                ".if {fresh}",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                ".else",
                "tileloadd tmm0, [{sums} + {sum_stride}]",
                ".if {columns} == 2",
                "tileloadd tmm1, [{sums} + {sum_stride} + 64]",
                ".endif",
                ".if {rows} == 2",
                "tileloadd tmm2, [{lower_sums} + {sum_stride}]",
                ".if {columns} == 2",
                "tileloadd tmm3, [{lower_sums} + {sum_stride} + 64]",
                ".endif",
                ".endif",
                ".endif",
                "2:",
                "tileloadd tmm4, [{left} + {left_stride}]",
                "tileloadd tmm6, [{right} + {right_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                ".if {columns} == 2",
                "tileloadd tmm7, [{right} + {right_stride} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                ".endif",
                ".if {rows} == 2",
                "tileloadd tmm5, [{lower_left} + {left_stride}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                ".if {columns} == 2",
                "tdpbf16ps tmm3, tmm5, tmm7",
                ".endif",
                ".endif",
                "add {left}, {left_step}",
                "add {lower_left}, {left_step}",
                "add {right}, {right_step}",
                "dec {depth}",
                "jnz 2b",
                "tilestored [{sums} + {sum_stride}], tmm0",
                ".if {columns} == 2",
                "tilestored [{sums} + {sum_stride} + 64], tmm1",
                ".endif",
                ".if {rows} == 2",
                "tilestored [{lower_sums} + {sum_stride}], tmm2",
                ".if {columns} == 2",
                "tilestored [{lower_sums} + {sum_stride} + 64], tmm3",
                ".endif",
                ".endif",
                fresh = const FRESH as usize,
                rows = const ROWS,
                columns = const COLUMNS,
                sums = in(reg) sums,
                lower_sums = in(reg) sums.wrapping_byte_add(SIDE * a.sum_stride),
                sum_stride = in(reg) a.sum_stride,
                left = inout(reg) a.left => _,
                lower_left = inout(reg) a.left.wrapping_byte_add(SIDE * a.left_stride) => _,
                left_stride = in(reg) a.left_stride,
                left_step = in(reg) a.left_step,
                right = inout(reg) a.right => _,
                right_stride = in(reg) a.right_stride,
                right_step = in(reg) a.right_step,
                depth = inout(reg) a.depth => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Multiplies tiles of zeros as fast as the unit can, and says how many operations that were.
///
/// # Safety
/// The instruction set.
pub(crate) unsafe fn burst() -> f64 {
    const ROUNDS: usize = 250;
    // SAFETY: by contract.
    unsafe {
        Hardware::enter();
        asm!(
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) ROUNDS => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack),
        );
        Hardware::leave();
    }
    (4 * ROUNDS * SIDE * SIDE * 2 * SIDE * 2) as f64
}
