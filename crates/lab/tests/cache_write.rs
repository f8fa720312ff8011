//! The kernel that writes to caches, on the simulator: every byte held against the CPU's, every access watched, under two schedules.

use evosdpa::DType;
use evosdpa_lab::agreement::cache_write::{Kernels, TURN, Turn, Write, contiguous, paged, questions};
use ptxsan::Schedule;

/// The same bytes as the CPU's, under two schedules, and nothing found.
#[test]
fn tokens_and_queries_come_out_as_the_cpus_bit_by_bit() {
    let kernels = Kernels::compile().unwrap();
    for (name, write) in questions() {
        let expected = write.expected().unwrap();
        for schedule in [Schedule::ALL[0], Schedule::ALL[1]] {
            let (got, outcome) = kernels.simulate(&write, schedule).unwrap();
            assert!(outcome.is_clean(), "{name}: {}", outcome.findings[0]);
            assert_eq!(got.filled, expected.filled, "{name}");
            for (at, tensor) in ["k_cache", "v_cache"].into_iter().enumerate() {
                assert!(got.caches[at] == expected.caches[at], "{name}: {tensor} differs");
            }
            assert!(got.q == expected.q, "{name}: the turned queries differ");
        }
    }
}

/// What differs by one page, one length, one angle must be told apart, or the comparison above proves nothing.
#[test]
fn small_differences_are_noticed() {
    let kernels = Kernels::compile().unwrap();
    let write = Write { rotary: Some(TURN), ..paged(DType::BF16) };
    let expected = write.expected().unwrap();
    let turned = |turn: Turn| Write { rotary: Some(turn), ..write.clone() };
    for (name, other) in [
        ("two pages swapped", Write { table: Some((vec![2, 5, 0, 3], 2)), ..write.clone() }),
        ("a length off by one", Write { lengths: vec![3, 1], ..write.clone() }),
        ("cosines for sines", turned(Turn { swapped: true, ..TURN })),
        ("neighbours for halves", turned(Turn { interleaved: true, ..TURN })),
        ("a position off by one", turned(Turn { first: Some(vec![4, 1]), ..TURN })),
        ("queries that stand still", turned(Turn { advance: false, ..TURN })),
    ] {
        let (got, outcome) = kernels.simulate(&other, Schedule::ALL[0]).unwrap();
        assert!(outcome.is_clean() && got != expected, "{name}");
    }
}

/// Whatever lengths, pages and indices hold, nothing outside the caches is written, and what has a place gets there.
#[test]
fn tokens_without_a_place_are_left_out() {
    let kernels = Kernels::compile().unwrap();
    let dtype = DType::BF16;
    let nothing = [
        ("a negative length", Write { lengths: vec![-1, i32::MIN], ..paged(dtype) }),
        ("lengths past the cache", Write { lengths: vec![8, i32::MAX], ..contiguous(dtype) }),
        (
            "pages that are not there",
            Write { table: Some((vec![6, -1, i32::MAX, i32::MIN], 2)), ..paged(dtype) },
        ),
        ("blocks that are not there", Write { index: Some(vec![2, -1]), ..contiguous(dtype) }),
        ("rows that are not there", Write { index: Some(vec![i32::MAX, i32::MIN]), ..paged(dtype) }),
        (
            "cumulative lengths that are none",
            Write { cu_new: Some(vec![i32::MAX, i32::MIN, -5]), ..contiguous(dtype) },
        ),
        (
            "positions without angles",
            Write { rotary: Some(Turn { first: Some(vec![-3, 40]), ..TURN }), ..contiguous(dtype) },
        ),
    ];
    for (name, write) in nothing {
        let (got, outcome) = kernels.simulate(&write, Schedule::ALL[1]).unwrap();
        assert!(outcome.is_clean(), "{name}: {}", outcome.findings[0]);
        assert!(got.caches == write.caches(), "{name}: something was written");
        let room = if write.table.is_some() { 8 } else { write.cache[1] as i32 };
        assert!(got.filled.iter().all(|filled| (0..=room).contains(filled)), "{name}: {:?}", got.filled);
        if write.rotary.is_some() {
            let q: &[half::bf16] = bytemuck::cast_slice(&got.q);
            assert!(q.iter().all(|x| x.is_nan()), "{name}");
        }
    }
    // One sequence is full; the other gets its tokens.
    let half = Write { lengths: vec![8, 0], ..contiguous(dtype) };
    let (got, _) = kernels.simulate(&half, Schedule::ALL[0]).unwrap();
    assert!(got.caches != half.caches() && got.filled == [8, 2]);
    let split = got.caches[0].len() / 2;
    assert_eq!(got.caches[0][..split], half.caches()[0][..split]);
}
