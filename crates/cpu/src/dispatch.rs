//! From a job to the kernels of an instruction set.

use crate::error::Error;
use crate::isa::Isa;
use crate::job::{Job, Shape};
use crate::kernels::Kernels;
use crate::options::{CpuOptions, FlashTiles};
use crate::partial::{Partials, merge};
use crate::plan::Plan;
use crate::portable::Portable;
use crate::workspace::with_scratch;
use crate::{few, flash, pool};

/// Multiply-adds below which other threads are left asleep: about ten microseconds of one core.
const ONE_THREAD_WORK: usize = 400_000;

/// Runs the flash kernel.
pub(crate) fn run_flash(job: &Job, options: &CpuOptions) -> Result<(), Error> {
    let isa = Isa::resolve(options.isa)?;
    let tiles = options.tile_sizes(job.shape.dim_qk, job.shape.dim_v)?;
    let threads = useful_threads(&job.shape, options.thread_count()?);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if job.is_bf16() => run_with::<crate::avx512bf16::Avx512Bf16>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => run_with::<crate::avx512::Avx512>(job, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => run_with::<crate::avx2::Avx2>(job, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => run_with::<crate::neon::Neon>(job, &tiles, threads),
        _ => run_with::<Portable>(job, &tiles, threads),
    }
    Ok(())
}

/// Threads worth waking for a problem of this size.
pub(crate) fn useful_threads(shape: &Shape, threads: usize) -> usize {
    let work = [shape.heads_q, shape.seq_q, shape.seq_kv, shape.dim_qk + shape.dim_v]
        .iter()
        .fold(shape.batch, |product, n| product.saturating_mul(*n));
    if work < ONE_THREAD_WORK { 1 } else { threads }
}

/// Runs the flash kernel with the kernels `K`, which this machine was found to support.
fn run_with<K: Kernels>(job: &Job, tiles: &FlashTiles, threads: usize) {
    let plan = Plan::new(&job.shape, tiles, K::VECTORS * K::LANES, threads);
    let mut partial_data = vec![0.0; Partials::floats(plan.partial_rows, job.shape.dim_v)];
    let partials = Partials::new(&mut partial_data, job.shape.dim_v);
    if plan.decode {
        let layout = few::Scratch::new(&job.shape);
        pool::run(threads, plan.units.len(), &|index| {
            with_scratch(layout.floats, |scratch| {
                // SAFETY: the instruction set was resolved, the job checked, and units own disjoint rows.
                unsafe { few::run_unit::<K>(job, &layout, &plan.units[index], &partials, scratch) }
            });
        });
    } else {
        let most_rows = plan.units.iter().map(|unit| unit.rows.len()).max().unwrap_or(0);
        let layout = flash::Scratch::new::<K>(&job.shape, tiles, most_rows);
        pool::run(threads, plan.units.len(), &|index| {
            with_scratch(layout.floats, |scratch| {
                // SAFETY: the instruction set was resolved, the job checked, and units own disjoint rows.
                unsafe { flash::run_unit::<K>(job, tiles, &layout, &plan.units[index], &partials, scratch) }
            });
        });
    }
    pool::run(threads, plan.split_rows.len(), &|index| {
        // SAFETY: all units are done; the row sets are disjoint.
        unsafe { merge::<K>(job, &partials, &plan.split_rows[index]) }
    });
}

/// Scratch memory the flash kernel takes for a problem of this shape, in bytes, over all threads.
pub(crate) fn flash_workspace_bytes(shape: &Shape, options: &CpuOptions) -> Result<usize, Error> {
    let isa = Isa::resolve(options.isa)?;
    let tiles = options.tile_sizes(shape.dim_qk, shape.dim_v)?;
    let threads = useful_threads(shape, options.thread_count()?);
    Ok(match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => workspace_bytes::<crate::avx512::Avx512>(shape, &tiles, threads),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => workspace_bytes::<crate::avx2::Avx2>(shape, &tiles, threads),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => workspace_bytes::<crate::neon::Neon>(shape, &tiles, threads),
        _ => workspace_bytes::<Portable>(shape, &tiles, threads),
    })
}

fn workspace_bytes<K: Kernels>(shape: &Shape, tiles: &FlashTiles, threads: usize) -> usize {
    let plan = Plan::new(shape, tiles, K::VECTORS * K::LANES, threads);
    let per_thread = if plan.decode {
        few::Scratch::new(shape).floats
    } else {
        let most_rows = plan.units.iter().map(|unit| unit.rows.len()).max().unwrap_or(0);
        flash::Scratch::new::<K>(shape, tiles, most_rows).floats
    };
    let partial = Partials::floats(plan.partial_rows, shape.dim_v);
    let plan_bytes = plan.units.len() * size_of::<crate::plan::Unit>();
    (per_thread * threads.min(plan.units.len().max(1)) + partial) * size_of::<f32>() + plan_bytes
}
