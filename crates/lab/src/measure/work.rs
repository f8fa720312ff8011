//! Operations and bytes that a problem needs at least.

use evosdpa_core::Problem;
use evosdpa_oracle::inputs::{Arrangement, LengthFamily};

/// Operations and bytes, which rates, roofs and floors are counted by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Floating-point operations that masks and lengths leave to be done.
    pub flops: f64,
    /// The fewest bytes that must move.
    pub bytes: f64,
}

impl Work {
    /// Of a problem whose lengths are of a family.
    pub fn with_lengths(problem: &Problem, lengths: LengthFamily) -> Self {
        if lengths == LengthFamily::Equal {
            return problem.into();
        }
        let none = Self { flops: 0.0, bytes: 0.0 };
        Arrangement::timed(lengths).lengths_of(problem).into_iter().fold(none, |work, (queries, keys)| Self {
            flops: work.flops + problem.flops_of(queries, keys),
            bytes: work.bytes + problem.bytes_of(queries, keys) as f64,
        })
    }
}

/// Of sequences that are all as long as the problem says.
impl From<&Problem> for Work {
    fn from(problem: &Problem) -> Self {
        Self { flops: problem.flops(), bytes: problem.bytes() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;

    use super::*;

    #[test]
    fn work_is_that_of_the_lengths_that_are_there() {
        let problem = Problem::new("b3h4/2s8d16:causal-br:varlen".parse().unwrap(), DType::BF16).unwrap();
        let equal = Work::from(&problem);
        assert_eq!(Work::with_lengths(&problem, LengthFamily::Equal), equal);
        // Causal squares of 8, 4 and 2 tokens have 36, 10 and 3 pairs.
        let skewed = Work::with_lengths(&problem, LengthFamily::Skewed);
        assert_eq!(skewed.flops, 2.0 * 4.0 * 32.0 * 49.0);
        assert_eq!(equal.flops, 2.0 * 4.0 * 32.0 * 108.0);
        // Rows of queries and output and of keys and values, two bytes an element.
        assert_eq!(skewed.bytes, 14.0 * (4.0 + 2.0) * 32.0 * 2.0);
        assert!(skewed.bytes < equal.bytes);
    }
}
