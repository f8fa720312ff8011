//! One sequence: how many queries and keys it has, and which of them see which.

use evosdpa_core::Problem;

/// Query `i` sees keys `i + band_lo ..= i + band_hi` that exist, of its own chunk where there are chunks. Both ends of what a
/// query sees grow with `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) band_lo: i64,
    pub(crate) band_hi: i64,
    /// The key that query 0 is aligned with: what chunks and ALiBi count from.
    pub(crate) position: i64,
    /// Keys of a chunk; 0 without chunks.
    pub(crate) chunk: i64,
}

impl Span {
    /// A sequence of these lengths.
    pub(crate) fn new(problem: &Problem, queries: usize, keys: usize) -> Span {
        let band = problem.mask().band(queries, keys);
        Span {
            queries,
            keys,
            band_lo: band.lo,
            band_hi: band.hi,
            position: problem.position(0, queries, keys),
            chunk: problem.scores().chunk.map_or(0, |chunk| chunk.keys() as i64),
        }
    }

    /// The first key and one past the last key seen by at least one of queries `first..=last`.
    pub(crate) fn seen_by_any(&self, first: usize, last: usize) -> (usize, usize) {
        self.clip(self.first_seen(first), self.last_seen(last))
    }

    /// The same for keys seen by every one of queries `first..=last`.
    pub(crate) fn seen_by_all(&self, first: usize, last: usize) -> (usize, usize) {
        self.clip(self.first_seen(last), self.last_seen(first))
    }

    fn first_seen(&self, query: usize) -> i64 {
        let first = (query as i64).saturating_add(self.band_lo);
        if self.chunk == 0 { first } else { first.max(self.chunk_start(query)) }
    }

    fn last_seen(&self, query: usize) -> i64 {
        let last = (query as i64).saturating_add(self.band_hi);
        if self.chunk == 0 { last } else { last.min(self.chunk_start(query) + self.chunk - 1) }
    }

    fn chunk_start(&self, query: usize) -> i64 {
        (query as i64 + self.position).div_euclid(self.chunk) * self.chunk
    }

    fn clip(&self, lo: i64, hi: i64) -> (usize, usize) {
        let end = hi.saturating_add(1).clamp(0, self.keys as i64);
        let begin = lo.clamp(0, end);
        (begin as usize, end as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_core::{DType, Problem};

    #[test]
    fn a_span_says_what_the_problem_says() {
        for text in
            ["causal", "causal-br", "window=3/1", "chunk=4", "causal-br:chunk=3", "window=5/0:chunk=6"]
        {
            let problem = Problem::new(format!("b1h1s9/14d8:{text}").parse().unwrap(), DType::F32).unwrap();
            for (queries, keys) in [(1, 1), (9, 14), (5, 3), (3, 0), (4, 13)] {
                let span = Span::new(&problem, queries, keys);
                for query in 0..queries {
                    let seen = problem.visible(query, queries, keys);
                    let (begin, end) = span.seen_by_any(query, query);
                    assert_eq!(span.seen_by_all(query, query), (begin, end));
                    assert!((begin..end) == seen || (begin == end && seen.is_empty()), "{text} {query}");
                }
                for (first, last) in [(0, queries - 1), (queries / 2, queries - 1)] {
                    let each: Vec<_> = (first..=last).map(|q| problem.visible(q, queries, keys)).collect();
                    let (begin, end) = span.seen_by_any(first, last);
                    assert!(each.iter().all(|s| s.is_empty() || (begin <= s.start && s.end <= end)));
                    let (begin, end) = span.seen_by_all(first, last);
                    assert!((begin..end).all(|key| each.iter().all(|s| s.contains(&key))), "{text}");
                }
            }
        }
    }
}
