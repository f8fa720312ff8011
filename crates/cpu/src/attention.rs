//! The crate's one entry: from a problem and tensors to a job.

use crate::dispatch::{flash_workspace_bytes, run_flash};
use crate::error::Error;
use crate::job::{Job, Operand, Scales, Shape};
use crate::modifiers::Modifiers;
use crate::naive::Naive;
use crate::options::{CpuKernel, CpuOptions};
use evosdpa_core::{
    DType, Granularity, PageSize, Precision, Problem, Sequences, SideInputs, TensorView, TensorViewMut,
};

/// Computes attention on the CPU.
///
/// `side` is what the problem's kinds ask for: lengths, pages, modifiers' data, scales; the default for plain problems.
/// `lse`, when given, holds `[batch][query heads][queries]` (packed, `[query heads][tokens]`) and receives the natural
/// log-sum-exp of each row's scores as they go into the softmax, a sink among them.
///
/// # What comes out in the corners
/// - A row that sees no key gives `O = 0` and `LSE = -inf`, or its head's sink.
/// - A row that belongs to no sequence (behind the last of packed queries, behind those that a sequence uses) gives `O = 0` and
///   `LSE = -inf`.
/// - A key that a query does not see has no influence on that query's row, whatever it holds, NaN included.
/// - A visible score that is NaN or +inf makes its whole row (and LSE) NaN. A visible score of -inf counts as weight 0;
///   when all visible scores of a row are -inf, the row is as one that sees no key.
/// - NaN or infinity in a visible row of V makes the same columns of the row non-finite.
/// - Weights below 2^-126 of the row's largest count as 0.
///
/// The result is the same, bit for bit, for any number of threads and on every run with the same instruction set and tile sizes. A
/// sequence's rows do not depend on what else is in the batch, nor on how its keys are packed or paged.
///
/// # Errors
/// When tensors or what comes beside them do not match the problem, or an option cannot be met; nothing is written then.
pub fn attention(
    kernel: CpuKernel,
    problem: &Problem,
    q: TensorView<'_>,
    k: TensorView<'_>,
    v: TensorView<'_>,
    side: &SideInputs<'_>,
    mut o: TensorViewMut<'_>,
    mut lse: Option<&mut [f32]>,
    options: &CpuOptions,
) -> Result<(), Error> {
    problem.check(&q, &k, &v, &o, lse.as_ref().map(|lse| lse.len()))?;
    let lse = lse.as_mut().map_or(std::ptr::null_mut(), |lse| lse.as_mut_ptr());
    let rows_per_head = o.shape()[2];
    let o = operand(o.dtype(), o.strides(), o.bytes_mut().as_mut_ptr());
    let sequences = problem.check_side(side, &q, &k, &v)?;
    if kernel == CpuKernel::Naive {
        Naive::new(problem, sequences, [q, k, v], side, o, lse).run(options)?;
        // SAFETY: O and the LSE are this call's alone, and have these rows.
        unsafe { clear_unowned(problem, &sequences, &o, lse, rows_per_head) };
        return Ok(());
    }
    let reach = problem.scale_granularity();
    let job = Job {
        problem,
        shape: Shape::new(problem),
        sequences,
        page: problem.lengths().page.map(PageSize::tokens),
        modifiers: Modifiers::new(problem, side),
        q: input(&q, side.scales.q, reach),
        k: input(&k, side.scales.k, reach),
        v: input(&v, side.scales.v, reach),
        o,
        lse,
        rows_per_head,
        precise: problem.precision() == Precision::High,
        output: problem.output_float(),
    };
    run_flash(&job, options)?;
    // SAFETY: O and the LSE are this call's alone, and have these rows.
    unsafe { clear_unowned(problem, &sequences, &o, lse, rows_per_head) };
    Ok(())
}

/// Rows that belong to no sequence.
///
/// # Safety
/// `o` and `lse`, unless it is null, are valid to write, with so many rows in each head.
unsafe fn clear_unowned(
    problem: &Problem,
    sequences: &Sequences<'_>,
    o: &Operand<'_, *mut u8>,
    lse: *mut f32,
    rows_per_head: usize,
) {
    let (sizes, bytes) = (problem.sizes(), o.dtype.bytes());
    for (block, rows) in sequences.unowned(rows_per_head) {
        for head in 0..sizes.heads_q {
            for row in rows.clone() {
                let at = block * o.batch_stride + head * o.head_stride + row * o.row_stride;
                // SAFETY: by contract; zeros are numbers of every type.
                unsafe { o.data.add(at * bytes).write_bytes(0, sizes.dim_v * bytes) };
            }
            if !lse.is_null() {
                let first = (block * sizes.heads_q + head) * rows_per_head + rows.start;
                // SAFETY: by contract.
                unsafe { std::slice::from_raw_parts_mut(lse.add(first), rows.len()) }.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Memory that [`attention`] with [`CpuKernel::Flash`] takes beside the tensors, in bytes, over all threads, for sequences of the
/// longest. It depends on the tile sizes and head dimensions and, but for a list of work units, not on the sequence length.
///
/// # Errors
/// When an option cannot be met.
pub fn workspace_bytes(problem: &Problem, options: &CpuOptions) -> Result<usize, Error> {
    flash_workspace_bytes(problem, options)
}

/// The scales were checked against the tensor.
fn input<'a>(view: &TensorView<'a>, scales: Option<&'a [f32]>, reach: Granularity) -> Operand<'a, *const u8> {
    let [_, heads, rows, _] = view.shape();
    let scales = scales.map(|values| Scales { values, reach, heads, rows });
    Operand { scales, ..operand(view.dtype(), view.strides(), view.bytes().as_ptr()) }
}

fn operand<'a, P>(dtype: DType, strides: [usize; 4], data: P) -> Operand<'a, P> {
    let [batch_stride, head_stride, row_stride, _] = strides;
    Operand { data, dtype, batch_stride, head_stride, row_stride, scales: None }
}
