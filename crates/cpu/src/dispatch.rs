//! From a job to the kernels of an instruction set.

use crate::amx::{self, Amx};
#[cfg(target_arch = "x86_64")]
use crate::avx512bf16::Avx512Bf16;
use crate::error::Error;
use crate::isa::Isa;
use crate::job::{Job, Shape};
use crate::kernels::Kernels;
use crate::options::{CpuOptions, FlashTiles};
use crate::partial::{Partials, merge};
use crate::plan::{Plan, Unit, total_pairs};
use crate::portable::Portable;
use crate::span::Span;
use crate::workspace::with_scratch;
use crate::{few, flash, pool};
use evosdpa_core::Problem;

/// Multiply-adds below which other threads are left asleep: about ten microseconds of one core.
const ONE_THREAD_WORK: usize = 400_000;

/// Runs the flash kernel.
pub(crate) fn run_flash(job: &Job<'_>, options: &CpuOptions) -> Result<(), Error> {
    let isa = Isa::resolve(options.isa)?.for_problem(job.problem);
    let tiles = options.tile_sizes(isa, job.shape.dim_qk, job.shape.dim_v)?;
    let threads = useful_threads(&job.shape, |sequence| job.span(sequence), options.thread_count()?);
    match isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => run_with::<Amx<amx::Hardware, Avx512Bf16>>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::AmxModel if Isa::Avx512Bf16.is_available() => {
            run_with::<Amx<amx::Model, Avx512Bf16>>(job, &tiles, threads)
        }
        Isa::AmxModel => run_with::<Amx<amx::Model, amx::PortablePairs>>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => run_with::<Avx512Bf16>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => run_with::<crate::avx512::Avx512>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => run_with::<crate::avx2::Avx2>(job, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonMmla => run_with::<crate::neon_mmla::NeonMmla>(job, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonBf16 => run_with::<crate::neon_bf16::NeonBf16>(job, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => run_with::<crate::neon::Neon>(job, &tiles, threads),
        _ => run_with::<Portable>(job, &tiles, threads),
    }
    Ok(())
}

/// Threads worth waking for sequences of these lengths.
pub(crate) fn useful_threads(shape: &Shape, span: impl Fn(usize) -> Span, threads: usize) -> usize {
    let work = total_pairs(shape, span).saturating_mul(shape.heads_q * (shape.dim_qk + shape.dim_v));
    if work < ONE_THREAD_WORK { 1 } else { threads }
}

/// Scratch memory of the two kinds of units.
struct Layouts {
    tiles: flash::Scratch,
    few: few::Scratch,
}

impl Layouts {
    fn new<K: Kernels>(shape: &Shape, tiles: &FlashTiles, plan: &Plan) -> Layouts {
        Layouts {
            tiles: flash::Scratch::new::<K>(shape, tiles, plan.tile_rows),
            few: few::Scratch::new(shape, plan.decode_rows),
        }
    }

    /// Floats that a unit takes.
    fn floats(&self, unit: &Unit) -> usize {
        if unit.decode { self.few.floats } else { self.tiles.floats }
    }
}

fn plan<K: Kernels>(shape: &Shape, span: impl Fn(usize) -> Span, tiles: &FlashTiles, threads: usize) -> Plan {
    let few_limit = K::few_limit((shape.dim_qk + shape.dim_v) / 2);
    Plan::new(shape, span, tiles, K::VECTORS * K::LANES, few_limit, threads)
}

/// Runs the flash kernel with the kernels `K`, which this machine was found to support.
fn run_with<K: Kernels>(job: &Job<'_>, tiles: &FlashTiles, threads: usize) {
    let span = |sequence| job.span(sequence);
    let plan = plan::<K>(&job.shape, span, tiles, threads);
    let mut partial_data = vec![0.0; Partials::floats(plan.partial_rows, job.shape.dim_v)];
    let partials = Partials::new(&mut partial_data, job.shape.dim_v);
    let layouts = Layouts::new::<K>(&job.shape, tiles, &plan);
    pool::run(threads, plan.units.len(), &|index| {
        let unit = &plan.units[index];
        with_scratch(layouts.floats(unit), |scratch| {
            // SAFETY: the instruction set was resolved, the job checked, and units own disjoint rows.
            unsafe {
                if unit.decode {
                    few::run_unit::<K::Few>(job, &layouts.few, unit, &partials, scratch);
                } else {
                    K::enter();
                    flash::run_unit::<K>(job, tiles, &layouts.tiles, unit, &partials, scratch);
                    K::leave();
                }
            }
        });
    });
    pool::run(threads, plan.split_rows.len(), &|index| {
        // SAFETY: all units are done; the row sets are disjoint.
        unsafe { merge::<K>(job, &partials, &plan.split_rows[index]) }
    });
}

/// Scratch memory the flash kernel takes for sequences of the longest, in bytes, over all threads.
pub(crate) fn flash_workspace_bytes(problem: &Problem, options: &CpuOptions) -> Result<usize, Error> {
    let sizes = problem.sizes();
    let (shape, span) = (&Shape::new(problem), Span::new(problem, sizes.seq_q, sizes.seq_kv));
    let isa = Isa::resolve(options.isa)?.for_problem(problem);
    let tiles = options.tile_sizes(isa, shape.dim_qk, shape.dim_v)?;
    let threads = useful_threads(shape, |_| span, options.thread_count()?);
    Ok(match isa {
        Isa::Amx | Isa::AmxModel => {
            workspace_bytes::<Amx<amx::Model, amx::PortablePairs>>(shape, span, &tiles, threads)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => workspace_bytes::<Avx512Bf16>(shape, span, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => workspace_bytes::<crate::avx2::Avx2>(shape, span, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonBf16 | Isa::NeonMmla => {
            workspace_bytes::<crate::neon_bf16::NeonBf16>(shape, span, &tiles, threads)
        }
        _ => workspace_bytes::<Portable>(shape, span, &tiles, threads),
    })
}

fn workspace_bytes<K: Kernels>(shape: &Shape, span: Span, tiles: &FlashTiles, threads: usize) -> usize {
    let plan = plan::<K>(shape, |_| span, tiles, threads);
    let layouts = Layouts::new::<K>(shape, tiles, &plan);
    let per_thread = plan.units.iter().map(|unit| layouts.floats(unit)).max().unwrap_or(0);
    let partial = Partials::floats(plan.partial_rows, shape.dim_v);
    let plan_bytes = plan.units.len() * size_of::<Unit>();
    (per_thread * threads.min(plan.units.len().max(1)) + partial) * size_of::<f32>() + plan_bytes
}
