//! The output of each negative control.

use std::ops::Range;

use evosdpa_core::{Alignment, Kinds, Mask, Problem, Scores, Sequences, SideInputs, Tensor, TensorView};
use rayon::prelude::*;

use crate::{
    Case, Control,
    case::question_of,
    elements,
    inputs::{Inputs, Side},
    reference::{self, Question, Sample},
};

/// The output of a control that the case's problem has. `values` are what the case's inputs stand for.
pub(crate) fn of(case: &Case, values: &Inputs, control: Control) -> Tensor {
    let problem = &case.problem;
    let [_, heads, seq, dim] = problem.o_shape();
    let sample = &case.truth.reference.sample;
    let row_of = |[b, h, s, _]: [usize; 4]| (b * heads + h) * seq + s;
    let make = |value: &(dyn Fn([usize; 4]) -> f64 + Sync)| {
        elements::from_fn(problem.o_shape(), problem.output_dtype(), problem.layout(), value)
    };
    let make_rows = |values: &(dyn Fn([usize; 3], &mut [f64]) + Sync)| {
        let mut tensor = Tensor::zeros(problem.o_shape(), problem.output_dtype(), problem.layout());
        elements::fill_rows(&mut tensor, values);
        tensor
    };
    let of_rows = |o: Vec<f32>| {
        make_rows(&|[b, h, s], row| {
            let values = &o[row_of([b, h, s, 0]) * dim..][..dim];
            row.iter_mut().zip(values).for_each(|(row, &x)| *row = f64::from(x));
        })
    };
    match control {
        Control::Zeros => make(&|_| 0.0),
        Control::CopyOfV => {
            let values = Values::of(case, values);
            make_rows(&|index, row| values.copy(index, row))
        }
        Control::MeanOfV => {
            let values = Values::of(case, values);
            let means = values.means();
            make_rows(&|index, row| values.copy_mean(&means, index, row))
        }
        Control::PreviousOutput => {
            let o = &case.truth.reference.o;
            if problem.rows() > seq {
                let next_head = |index: [usize; 4]| (row_of(index) + seq) % problem.rows();
                return make(&|index| o[next_head(index) * dim + index[3]]);
            }
            let before = Inputs::generate(problem, case.family, case.seed.wrapping_add(1));
            // The same lengths: another call over the same cache.
            let before =
                Inputs { side: case.inputs.side.clone(), ..before.dequantized(problem).into_owned() };
            of_rows(reference::solve_roughly(&question_of(problem, &before), sample))
        }
        Control::AnotherMask => {
            let other = match problem.mask() {
                Mask::Full => Mask::Causal(Alignment::TopLeft),
                Mask::Causal(_) | Mask::Window { .. } => Mask::Full,
            };
            if !problem.features().is_empty() {
                let other = problem.with_mask(other);
                return of_rows(reference::solve_roughly(&question_of(&other, values), sample));
            }
            let (q, k, v) = (values.q.view(), values.k.view(), values.v.view());
            let one = Question::new(
                &problem.with_mask(other).of_one_head(),
                [q.first_head(), k.first_head(), v.first_head()],
                &SideInputs::default(),
            );
            let first = one.map(|one| reference::solve_roughly(&one, &Sample::whole())).unwrap_or_default();
            let rest = &case.truth.reference.o;
            make(&|index| {
                let at = row_of(index) * dim + index[3];
                first.get(at).map_or_else(|| rest[at], |&x| f64::from(x))
            })
        }
        Control::NoScales => {
            // Codes are read at scale one.
            of_rows(reference::solve_roughly(&question_of(problem, &case.inputs), sample))
        }
        _ => {
            let mut values = values.clone();
            let problem = alter(problem, &mut values.side, control);
            of_rows(reference::solve_roughly(&question_of(&problem, &values), sample))
        }
    }
}

/// V as controls read it: by sequence and head.
struct Values<'a> {
    problem: Problem,
    v: TensorView<'a>,
    sequences: Sequences<'a>,
}

impl<'a> Values<'a> {
    fn of(case: &'a Case, values: &'a Inputs) -> Self {
        let sequences = *question_of(&case.problem, &case.inputs).sequences();
        Self { problem: case.problem, v: values.v.view(), sequences }
    }

    /// The sequence and query of a row of the output.
    fn owner(&self, [b, _, s]: [usize; 3]) -> Option<(usize, usize)> {
        if !self.problem.lengths().packed_queries {
            return Some((b, s));
        }
        let of = |sequence: &usize| self.sequences.queries(*sequence).contains(&s);
        let sequence = (0..self.sequences.count()).find(of)?;
        Some((sequence, s - self.sequences.queries(sequence).start))
    }

    fn row(&self, sequence: usize, head_kv: usize, key: usize, row: &mut Vec<f64>) {
        let place = self.sequences.key(sequence, key);
        self.v.row_f64(place.batch, head_kv, place.row, row);
    }

    /// The value of the query's own position; zeros where there is none.
    fn copy(&self, index: [usize; 3], out: &mut [f64]) {
        let owner = self.owner(index).filter(|(sequence, _)| self.sequences.keys(*sequence) > 0);
        let Some((sequence, query)) = owner else { return out.fill(0.0) };
        let mut row = Vec::with_capacity(out.len());
        let key = query % self.sequences.keys(sequence);
        self.row(sequence, index[1] / self.problem.group(), key, &mut row);
        out.copy_from_slice(&row);
    }

    /// Of each sequence and key/value head, `[column]`.
    fn means(&self) -> Vec<Vec<f64>> {
        let [_, heads, _, dim] = self.problem.v_shape();
        let mean = |i: usize| {
            let keys = self.sequences.keys(i / heads);
            let (mut mean, mut row) = (vec![0.0; dim], Vec::new());
            for key in 0..keys {
                self.row(i / heads, i % heads, key, &mut row);
                mean.iter_mut().zip(&row).for_each(|(mean, x)| *mean += x / keys as f64);
            }
            mean
        };
        (0..self.sequences.count() * heads).into_par_iter().map(mean).collect()
    }

    fn copy_mean(&self, means: &[Vec<f64>], index: [usize; 3], out: &mut [f64]) {
        let [_, heads, ..] = self.problem.v_shape();
        match self.owner(index) {
            Some((sequence, _)) => {
                out.copy_from_slice(&means[sequence * heads + index[1] / self.problem.group()]);
            }
            None => out.fill(0.0),
        }
    }
}

/// Changes lengths, pages or modifiers as a control says; returns the problem that is then asked.
fn alter(problem: &Problem, side: &mut Side, control: Control) -> Problem {
    let sizes = problem.sizes();
    let mut scores = problem.scores();
    match control {
        Control::ShiftedQueries => {
            side.cu_seqlens_q = side.cu_seqlens_q.take().map(|cu| moved(cu, -1, sizes.seq_q));
            if let (Some(cu), Some(used)) = (&side.cu_seqlens_q, &mut side.seqused_q) {
                used.iter_mut()
                    .zip(cu.windows(2))
                    .for_each(|(used, room)| *used = (*used).min(room[1] - room[0]));
            }
        }
        Control::OneKeyLess | Control::OneKeyMore => {
            let by = if control == Control::OneKeyLess { -1 } else { 1 };
            match (&mut side.seqused_kv, &side.cu_seqlens_kv) {
                (Some(used), cu) => {
                    for (b, used) in used.iter_mut().enumerate() {
                        let room = cu.as_ref().map_or(sizes.seq_kv as i32, |cu| cu[b + 1] - cu[b]);
                        let least = side.leftpad_kv.as_ref().map_or(0, |leftpad| leftpad[b]);
                        *used = (*used + by).clamp(least, room);
                    }
                    // A page that was not needed before is now: any will do, it is not the sequence's.
                    side.page_table.iter_mut().flatten().for_each(|page| *page = (*page).max(0));
                }
                (None, _) => {
                    side.cu_seqlens_kv = side.cu_seqlens_kv.take().map(|cu| moved(cu, by, sizes.seq_kv));
                    if let (Some(cu), Some(leftpad)) = (&side.cu_seqlens_kv, &mut side.leftpad_kv) {
                        let rooms = cu.windows(2).map(|room| room[1] - room[0]);
                        leftpad.iter_mut().zip(rooms).for_each(|(pad, room)| *pad = (*pad).min(room));
                    }
                }
            }
        }
        Control::OneQueryLess => {
            side.seqused_q.iter_mut().flatten().for_each(|used| *used = (*used - 1).max(0));
        }
        Control::ShiftedPadding => {
            side.leftpad_kv.iter_mut().flatten().for_each(|leftpad| *leftpad = (*leftpad - 1).max(0));
        }
        Control::NoIndices => {
            side.cache_batch_idx = Some((0..sizes.batch as i32).collect());
            // Of another's pages some may be missing: any will do.
            side.page_table.iter_mut().flatten().for_each(|page| *page = (*page).max(0));
        }
        Control::SwappedPages => swap_pages(problem, side),
        Control::ReversedPages => {
            let rows = used_pages(problem, side);
            if let Some(table) = &mut side.page_table {
                rows.into_iter().for_each(|row| table[row].reverse());
            }
        }
        Control::NoSoftcap => scores.softcap = None,
        Control::NoAlibi => (scores.alibi, side.alibi_slopes) = (false, None),
        Control::NoBias => (scores.bias, side.bias) = (None, None),
        Control::NoMask => (scores.mask, side.mask) = (None, None),
        Control::NoBlocks => (scores.blocks, side.blocks) = (None, None),
        Control::ShiftedBlocks => shift_blocks(side),
        Control::NoChunks => scores.chunk = None,
        Control::NoSinks => (scores.sinks, side.sinks) = (false, None),
        // The others do not change what is asked.
        _ => {}
    }
    with_scores(problem, scores)
}

fn shift_blocks(side: &mut Side) {
    let Some(table) = &mut side.blocks else { return };
    let [_, _, rows, columns] = table.view().shape();
    for table in table.bytes_mut().chunks_mut(rows * columns) {
        table.rotate_left(if rows > 1 { columns } else { 1 });
    }
}

fn with_scores(problem: &Problem, scores: Scores) -> Problem {
    let kinds = Kinds { scores, ..problem.shape().kinds() };
    // Fewer modifiers than a valid problem has are valid.
    problem.with_kinds(kinds).unwrap_or(*problem)
}

/// Cumulative lengths with each boundary moved, where both its neighbours allow it.
fn moved(mut cu: Vec<i32>, by: i32, longest: usize) -> Vec<i32> {
    let fits = |from: i32, to: i32| (0..=longest as i32).contains(&(to - from));
    for b in 1..cu.len() {
        let to = cu[b] + by;
        // The last boundary has no room behind it.
        let next_fits = cu.get(b + 1).map_or(by < 0, |&next| fits(to, next));
        if fits(cu[b - 1], to) && next_fits {
            cu[b] = to;
        }
    }
    cu
}

/// The entries of each sequence's pages that hold keys.
fn used_pages(problem: &Problem, side: &Side) -> Vec<Range<usize>> {
    let page = problem.lengths().page.map_or(1, |page| page.tokens());
    let of = |list: &Option<Vec<i32>>, b: usize, otherwise: usize| {
        list.as_ref().map_or(otherwise, |values| values[b] as usize)
    };
    (0..problem.sizes().batch)
        .map(|b| {
            let begin = of(&side.cache_batch_idx, b, b) * side.page_row_stride;
            let filled = of(&side.seqused_kv, b, problem.sizes().seq_kv);
            begin + of(&side.leftpad_kv, b, 0) / page..begin + filled.div_ceil(page)
        })
        .collect()
}

fn swap_pages(problem: &Problem, side: &mut Side) {
    let entries: Vec<usize> = used_pages(problem, side).into_iter().flatten().collect();
    let stride = side.page_row_stride;
    let Some(table) = &mut side.page_table else { return };
    let pair = |apart: bool| {
        let pairs = entries.iter().flat_map(|&i| entries.iter().rev().map(move |&j| (i, j)));
        pairs.into_iter().find(|&(i, j)| table[i] != table[j] && (i / stride != j / stride) == apart)
    };
    if let Some((i, j)) = pair(true).or_else(|| pair(false)) {
        table.swap(i, j);
    }
}
