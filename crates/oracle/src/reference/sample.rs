//! Which rows of an output the oracle answers for.

use evosdpa_core::Problem;

use super::ROWS;
use crate::rng::Rng;

/// The rows that a truth is worked out for: all of them, or, where that would take too long, some blocks of every head.
///
/// A chosen row is judged as strictly as ever; of the others it is only asked that they are written and finite.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Per block of rows, in the order of the output; `None` when every row is chosen.
    blocks: Option<Vec<bool>>,
    seq_q: usize,
}

impl Sample {
    /// Every row.
    pub fn whole() -> Self {
        Self::default()
    }

    /// Every row of a problem with at most this many multiply-adds. Of a larger one the first and the last block of every
    /// head, where masks and tails show, and as many others, drawn with the seed, as the work allows.
    pub fn of_at_most(problem: &Problem, multiply_adds: u64, seed: u64) -> Self {
        let sizes = problem.sizes();
        let per_row = (sizes.seq_kv * (sizes.dim_qk + sizes.dim_v)) as u64;
        if per_row.saturating_mul(problem.rows() as u64) <= multiply_adds {
            return Self::whole();
        }
        let (heads, per_head) = (sizes.batch * sizes.heads_q, sizes.seq_q.div_ceil(ROWS));
        let mut blocks = vec![false; heads * per_head];
        for head in blocks.chunks_mut(per_head) {
            head[0] = true;
            head[per_head - 1] = true;
        }
        let mut rng = Rng::new(seed);
        let draws = multiply_adds / per_row.saturating_mul(ROWS as u64).max(1);
        for _ in 0..draws {
            let block = rng.below(blocks.len());
            blocks[block] = true;
        }
        Self { blocks: Some(blocks), seq_q: sizes.seq_q }
    }

    /// Whether this row, counted in `[batch, query heads, queries]` order, is chosen.
    pub fn has(&self, row: usize) -> bool {
        self.blocks.as_ref().is_none_or(|blocks| {
            let per_head = self.seq_q.div_ceil(ROWS);
            blocks[row / self.seq_q * per_head + row % self.seq_q / ROWS]
        })
    }

    /// How many of a problem's rows are chosen; `None` when all are.
    pub fn count(&self, problem: &Problem) -> Option<usize> {
        self.blocks.as_ref().map(|_| (0..problem.rows()).filter(|&row| self.has(row)).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_core::DType;

    #[test]
    fn a_sample_has_both_ends_of_every_head_and_differs_by_seed() {
        let problem = Problem::new("b2h3s1000d16".parse().unwrap(), DType::F32).unwrap();
        let work = (problem.rows() * 1000 * 32) as u64;
        assert!(Sample::of_at_most(&problem, work, 1).count(&problem).is_none());
        let samples = [1, 2].map(|seed| Sample::of_at_most(&problem, work / 10, seed));
        for sample in &samples {
            let count = sample.count(&problem).unwrap();
            assert!((600..1_000).contains(&count), "{count} rows of {}", problem.rows());
            assert!((0..6).all(|head| sample.has(head * 1000) && sample.has(head * 1000 + 999)));
        }
        assert!((0..problem.rows()).any(|row| samples[0].has(row) != samples[1].has(row)));
    }
}
