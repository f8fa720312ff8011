use super::*;
use crate::hazard::clock::{Clock, Numbering};
use crate::hazard::history::{ASKED, ATOMIC};

fn by(known: &Clock, lane: u32, time: u32, pc: u32) -> Accessor<'_> {
    let numbering = Numbering::new(64, false);
    let base = lane / 32 * 32;
    Accessor {
        numbering,
        base,
        mask: 1 << (lane % 32),
        time,
        pc,
        known,
        alone: Some((lane % 32, 0)),
        lanes_base: base,
        agents_base: base + 64,
        proxy: None,
        passes_on: true,
        fences_reads: false,
    }
}

fn one(shadow: &mut Shadow, at: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> Option<Conflict> {
    shadow.access(at, bytes, write, by)[0]
}

#[test]
fn unordered_write_then_read_conflicts_and_ordered_does_not() {
    let numbering = Numbering::new(64, false);
    let fresh = Clock::new(numbering, 0, 64);
    let mut shadow = Shadow::new(1024);
    assert_eq!(one(&mut shadow, 16, 4, true, &by(&fresh, 0, 1, 7)), None);
    assert_eq!(one(&mut shadow, 16, 4, false, &by(&fresh, 0, 1, 8)), None, "own write");
    let conflict = one(&mut shadow, 16, 4, false, &by(&fresh, 40, 1, 9)).unwrap();
    assert_eq!((conflict.who, conflict.pc, conflict.is_write), (0, 7, true));
    let mut informed = fresh.clone();
    informed.raise(0, 1);
    informed.raise(40, 1);
    informed.settle();
    assert_eq!(one(&mut shadow, 16, 4, true, &by(&informed, 41, 1, 10)), None);
}

#[test]
fn all_unordered_readers_are_remembered() {
    let numbering = Numbering::new(64, false);
    let fresh = Clock::new(numbering, 0, 64);
    let mut shadow = Shadow::new(1024);
    assert_eq!(one(&mut shadow, 0, 4, false, &by(&fresh, 1, 1, 7)), None);
    assert_eq!(one(&mut shadow, 0, 4, false, &by(&fresh, 33, 1, 8)), None);
    let mut knows_first = fresh.clone();
    knows_first.raise(1, 1);
    knows_first.settle();
    let conflict = one(&mut shadow, 0, 4, true, &by(&knows_first, 2, 1, 9)).unwrap();
    assert_eq!((conflict.who, conflict.pc, conflict.is_write), (33, 8, false));
}

#[test]
fn halves_of_a_word_are_apart_and_history_survives_refinement() {
    let numbering = Numbering::new(64, false);
    let fresh = Clock::new(numbering, 0, 64);
    let mut shadow = Shadow::new(1024);
    assert_eq!(one(&mut shadow, 0, 16, true, &by(&fresh, 0, 1, 7)), None);
    assert_eq!(one(&mut shadow, 18, 2, true, &by(&fresh, 1, 1, 8)), None);
    assert_eq!(one(&mut shadow, 16, 2, true, &by(&fresh, 2, 1, 8)), None);
    assert!(one(&mut shadow, 14, 2, false, &by(&fresh, 3, 1, 9)).is_some());
    assert!(one(&mut shadow, 16, 4, false, &by(&fresh, 1, 1, 9)).is_some());
}

#[test]
fn a_thousand_readers_are_all_remembered() {
    let numbering = Numbering::new(1024, false);
    let fresh = Clock::new(numbering, 0, 1024);
    let as_reader =
        |lane: u32| Accessor { numbering, agents_base: lane / 32 * 32 + 1024, ..by(&fresh, lane, 1, lane) };
    let mut shadow = Shadow::new(256);
    for lane in 0..1024 {
        assert_eq!(one(&mut shadow, 0, 4, false, &as_reader(lane)), None);
    }
    // The writer knows of all readers but one.
    for unknown in [0, 1, 500, 1022] {
        let mut knows = fresh.clone();
        (0..1024).filter(|lane| *lane != unknown).for_each(|lane| knows.raise(lane, 1));
        knows.settle();
        let writer = Accessor { known: &knows, pc: 2000 | STRONG, ..as_reader(1023) };
        let conflict = one(&mut shadow, 0, 4, true, &writer).unwrap();
        assert_eq!((conflict.who, conflict.is_write), (unknown, false));
    }
}

#[test]
fn an_atomic_does_not_hide_what_came_before_it() {
    let numbering = Numbering::new(64, false);
    let fresh = Clock::new(numbering, 0, 64);
    for write in [true, false] {
        let mut shadow = Shadow::new(256);
        assert_eq!(one(&mut shadow, 0, 4, write, &by(&fresh, 0, 1, 7)), None);
        assert_eq!(one(&mut shadow, 0, 4, true, &by(&fresh, 0, 1, 8 | STRONG | ATOMIC)), None);
        let conflict = one(&mut shadow, 0, 4, true, &by(&fresh, 40, 1, 9 | STRONG | ATOMIC)).unwrap();
        assert_eq!((conflict.who, conflict.pc, conflict.is_write), (0, 7, write));
    }
    // Atomics alone do not conflict. A plain access behind one of them, if its result is used, has read what those before it stored, not
    // what those after it will.
    for write in [true, false] {
        for (other, asked, conflicts) in [(1, ASKED, false), (1, 0, true), (2, ASKED, true), (3, ASKED, true)]
        {
            let mut shadow = Shadow::new(256);
            assert_eq!(one(&mut shadow, 0, 4, true, &by(&fresh, 0, other, 8 | STRONG | ATOMIC)), None);
            assert_eq!(one(&mut shadow, 0, 4, true, &by(&fresh, 40, 2, 8 | STRONG | ATOMIC | asked)), None);
            let conflict = one(&mut shadow, 0, 4, write, &by(&fresh, 40, 3, 9));
            let found = conflict.map(|c| (c.who, c.is_write, c.both_strong));
            assert_eq!(found, conflicts.then_some((0, true, false)), "{write} {other}");
        }
    }
    // Lanes of one instruction come one after the other.
    let mut shadow = Shadow::new(256);
    for lane in [3, 5, 7] {
        assert_eq!(one(&mut shadow, 0, 4, true, &by(&fresh, lane, 2, 8 | STRONG | ATOMIC | ASKED)), None);
    }
    let conflict = one(&mut shadow, 0, 4, true, &by(&fresh, 5, 3, 9)).unwrap();
    assert_eq!(conflict.who, 7);
}
