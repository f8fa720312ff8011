//! Reads that are noted and not yet entered into cells.
//!
//! Most reads of shared memory are over, for every thread of the block, before anybody writes there again: a barrier comes between. Such
//! a read need not be remembered at all. So reads are noted here, a warp's at a time, and forgotten when all threads know of them;
//! whoever touches their chunk before that has them entered first.

use super::accessor::{Accessor, Found};
use super::chunk::CHUNK_SHIFT;
use super::clock::{Clock, Numbering};
use super::shadow::{Run, Shadow};
use std::rc::Rc;

/// So many places are noted before all are entered.
const MOST_PLACES: usize = 1 << 16;

/// Reads of one instruction of a warp, by lanes that know the same.
struct Noted {
    known: Rc<Clock>,
    /// As [`Accessor`] has it.
    base: u32,
    agents_base: u32,
    time: u32,
    pc: u32,
    /// Up to which group each lane's copies were waited for.
    waited: [u32; 32],
    bytes: u32,
    /// One behind the last of their places.
    end: usize,
}

impl Noted {
    /// Who read, at a place that `mask` read.
    fn accessor(&self, numbering: Numbering, mask: u32) -> Accessor<'_> {
        let lane = mask.trailing_zeros() & 31;
        Accessor {
            numbering,
            base: self.base,
            mask,
            time: self.time,
            pc: self.pc,
            known: &self.known,
            alone: mask.is_power_of_two().then(|| (lane, self.waited[lane as usize])),
            lanes_base: self.base,
            agents_base: self.agents_base,
            proxy: None,
            passes_on: true,
            fences_reads: false,
        }
    }
}

/// The reads of a region that are noted.
struct ReadLog {
    /// Chunks with noted reads carry it.
    generation: u32,
    /// Where, and which lanes.
    places: Vec<(u32, u32)>,
    all: Vec<Noted>,
    /// The time of the last read of each warp of the block.
    newest: Vec<u32>,
}

impl Default for ReadLog {
    fn default() -> Self {
        ReadLog { generation: 1, places: Vec::new(), all: Vec::new(), newest: Vec::new() }
    }
}

impl ReadLog {
    /// Ends the reads of one instruction.
    fn end(&mut self, by: &Accessor<'_>, known: &Rc<Clock>, waited: &[u32; 32], bytes: u32) {
        let end = self.places.len();
        if end == self.all.last().map_or(0, |noted| noted.end) {
            return;
        }
        let warp = by.numbering.slot_of(by.base) as usize / 32;
        if self.newest.len() <= warp {
            self.newest.resize(warp + 1, 0);
        }
        self.newest[warp] = by.time;
        self.all.push(Noted {
            known: Rc::clone(known),
            base: by.base,
            agents_base: by.agents_base,
            time: by.time,
            pc: by.pc,
            waited: *waited,
            bytes,
            end,
        });
    }

    /// Whether a thread that knows so much knows of all of them.
    fn is_known(&self, clock: &Clock) -> bool {
        clock.has_reached(&self.newest)
    }

    /// Starts anew.
    fn clear(&mut self) {
        self.generation = self.generation.wrapping_add(1).max(1);
        self.places.clear();
        self.all.clear();
        self.newest.fill(0);
    }
}

/// The cells of a block's shared memory, with the reads that are noted.
pub(crate) struct SharedShadow {
    cells: Shadow,
    reads: ReadLog,
    /// What the last reader knew, and a number for it that grows when another comes. A chunk that is known to it as a whole is not
    /// looked at again for each read.
    reader: Option<Rc<Clock>>,
    round: u32,
}

impl SharedShadow {
    pub(crate) fn new(bytes: usize) -> Self {
        SharedShadow { cells: Shadow::new(bytes), reads: ReadLog::default(), reader: None, round: 0 }
    }

    /// The cells, with all reads of these bytes in them.
    #[inline(always)]
    fn entered(&mut self, offset: usize, numbering: Numbering) -> &mut Shadow {
        if self.cells.noted(offset) == Some(self.reads.generation) {
            self.enter_reads(numbering);
        }
        &mut self.cells
    }

    /// See [`Shadow::access`].
    pub(crate) fn access(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> Found {
        self.entered(offset, by.numbering).access(offset, bytes, write, by)
    }

    /// See [`Shadow::pass`].
    #[inline]
    pub(crate) fn pass(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> bool {
        self.entered(offset, by.numbering).pass(offset, bytes, write, by)
    }

    /// See [`Shadow::pass_run`].
    #[inline]
    pub(crate) fn pass_run(&mut self, run: Run<'_>, by: &mut Accessor<'_>) -> u32 {
        self.entered(run.offset, by.numbering).pass_run(run, by)
    }

    /// See [`Shadow::earlier`].
    pub(crate) fn earlier(
        &mut self,
        offset: usize,
        bytes: u32,
        write: bool,
        numbering: Numbering,
    ) -> Vec<(u32, u32)> {
        self.entered(offset, numbering).earlier(offset, bytes, write)
    }

    /// Lanes that know so much are about to read.
    pub(crate) fn start_reads(&mut self, known: &Rc<Clock>) {
        if !self.reader.as_ref().is_some_and(|reader| Rc::ptr_eq(reader, known)) {
            self.reader = Some(Rc::clone(known));
            self.round = self.round.wrapping_add(1).max(1);
        }
    }

    /// Notes a plain read by lanes of a warp of the block, if it conflicts with nothing: the answer is as that of [`Shadow::pass`].
    /// [`SharedShadow::start_reads`] must come before it, [`SharedShadow::end_reads`] behind it before anything else.
    #[inline]
    pub(crate) fn note_read(&mut self, offset: usize, bytes: u32, by: &Accessor<'_>) -> bool {
        let Some((chunk, lists)) = self.cells.chunk(offset, bytes.trailing_zeros()) else { return false };
        let Some(range) = chunk.range(offset, bytes) else { return false };
        let is_free = chunk.is_all_known(self.round, by) || chunk.can_read(range, by, lists);
        if is_free {
            chunk.noted = self.reads.generation;
            self.reads.places.push((offset as u32, by.mask));
        }
        is_free
    }

    /// Notes reads as [`SharedShadow::note_read`] does, those of chunks whose writes are all known to the readers; for which lanes of
    /// `named`. `by`: who reads; each place is read by the lanes that `readers` says, of which there may be none.
    pub(crate) fn note_known(
        &mut self,
        offsets: &[u64; 32],
        named: u32,
        bytes: u32,
        readers: impl Fn(usize) -> u32,
        by: &Accessor<'_>,
    ) -> u32 {
        let (mut noted, mut rest) = (0, named);
        let (mut places, mut count) = ([(0, 0); 32], 0);
        // Rows that follow one another lie in the same chunk, mostly.
        let mut last = (usize::MAX, false);
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize & 31;
            rest &= rest - 1;
            let (offset, mask) = (offsets[lane] as usize, readers(lane));
            if last.0 != offset >> CHUNK_SHIFT {
                last = (offset >> CHUNK_SHIFT, mask != 0 && self.is_known_chunk(offset, bytes, by));
            }
            if last.1 && mask != 0 {
                noted |= 1 << lane;
                places[count & 31] = (offset as u32, mask);
                count += 1;
            }
        }
        self.reads.places.extend_from_slice(&places[..count.min(32)]);
        noted
    }

    /// Whether all that was written to a chunk is known to who reads; it then has noted reads.
    #[inline(always)]
    fn is_known_chunk(&mut self, offset: usize, bytes: u32, by: &Accessor<'_>) -> bool {
        let Some((chunk, _)) = self.cells.chunk(offset, bytes.trailing_zeros()) else { return false };
        let is_known = chunk.is_all_known(self.round, by);
        if is_known {
            chunk.noted = self.reads.generation;
        }
        is_known
    }

    /// Ends the reads of one instruction that were noted. `waited`: up to which group each lane's copies are waited for.
    pub(crate) fn end_reads(&mut self, by: &Accessor<'_>, known: &Rc<Clock>, waited: &[u32; 32], bytes: u32) {
        self.reads.end(by, known, waited, bytes);
        if self.reads.places.len() > MOST_PLACES {
            self.enter_reads(by.numbering);
        }
    }

    /// Threads have met: if all, each with its clock, know of the noted reads, no access that is to come can conflict with one.
    pub(crate) fn forget_reads<'c>(&mut self, mut clocks: impl Iterator<Item = &'c Rc<Clock>>) {
        if !self.reads.all.is_empty() && clocks.all(|clock| self.reads.is_known(clock)) {
            self.reads.clear();
        }
    }

    /// Enters the noted reads into their cells, in the order they were made.
    #[cold]
    fn enter_reads(&mut self, numbering: Numbering) {
        let mut from = 0;
        for noted in &self.reads.all {
            for &(offset, mask) in &self.reads.places[from..noted.end] {
                let by = noted.accessor(numbering, mask);
                let place = self.cells.chunk(offset as usize, noted.bytes.trailing_zeros());
                if let Some((chunk, lists)) = place
                    && let Some(range) = chunk.range(offset as usize, noted.bytes)
                {
                    chunk.remember(range, by.access(), &by, lists);
                }
            }
            from = noted.end;
        }
        self.reads.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const WARPS: u32 = 3;

    /// Three warps, each of which knows what it has learnt at barriers.
    struct Threads {
        numbering: Numbering,
        known: Vec<Rc<Clock>>,
        times: Vec<u32>,
    }

    impl Threads {
        fn new() -> Self {
            let numbering = Numbering::new(32 * WARPS, false);
            let clock = Rc::new(Clock::new(numbering, 0, 32 * WARPS));
            Threads { numbering, known: vec![clock; WARPS as usize], times: vec![1; WARPS as usize] }
        }

        fn by(&self, warp: u32, mask: u32, pc: u32) -> Accessor<'_> {
            let (base, lane) = (self.numbering.warp(0, warp), mask.trailing_zeros());
            Accessor {
                numbering: self.numbering,
                base,
                mask,
                time: self.times[warp as usize],
                pc,
                known: &self.known[warp as usize],
                alone: mask.is_power_of_two().then_some((lane, 0)),
                lanes_base: base,
                agents_base: self.numbering.agents(0, warp),
                proxy: None,
                passes_on: true,
                fences_reads: false,
            }
        }

        /// Some warps meet: each learns what the others did and knew.
        fn meet(&mut self, warps: u32) {
            let met: Vec<u32> = (0..WARPS).filter(|w| warps >> w & 1 == 1).collect();
            let mut clock = Clock::new(self.numbering, 0, 32 * WARPS);
            for &warp in &met {
                clock.join(&self.known[warp as usize]);
                (0..32).for_each(|lane| clock.raise(warp * 32 + lane, self.times[warp as usize]));
            }
            clock.settle();
            let clock = Rc::new(clock);
            for warp in met {
                self.known[warp as usize] = Rc::clone(&clock);
                self.times[warp as usize] += 1;
            }
        }
    }

    /// Whatever threads do, noting reads finds what entering each at once finds.
    #[test]
    fn noted_reads_conflict_with_what_they_would_if_they_were_entered() {
        let (mut conflicts, mut forgotten, mut entered) = (0, 0, 0);
        for seed in 0..60 {
            let mut random = Random::new(seed, 0);
            let mut threads = Threads::new();
            let (mut noting, mut plain) = (SharedShadow::new(1024), Shadow::new(1024));
            for pc in 0..400 {
                let warp = random.below(u64::from(WARPS)) as u32;
                let bytes = 4 << (random.below(3) as u32);
                let offset = (random.below(1024) as usize) & !(bytes as usize - 1);
                let first = random.below(29) as u32;
                match random.below(20) {
                    0..12 => {
                        let by = threads.by(warp, (1 + random.below(15) as u32) << first, pc);
                        let found = plain.access(offset, bytes, false, &by);
                        noting.start_reads(&threads.known[warp as usize]);
                        let is_noted = noting.note_read(offset, bytes, &by);
                        noting.end_reads(&by, &threads.known[warp as usize], &[0; 32], bytes);
                        assert_eq!(is_noted, found[0].is_none(), "seed {seed}, step {pc}");
                        if !is_noted {
                            assert_eq!(noting.access(offset, bytes, false, &by), found);
                            conflicts += 1;
                        }
                    }
                    12..16 => {
                        let by = threads.by(warp, 1 << first, pc);
                        let before = noting.reads.generation;
                        let found = plain.access(offset, bytes, true, &by);
                        assert_eq!(noting.access(offset, bytes, true, &by), found, "seed {seed}, step {pc}");
                        conflicts += u32::from(found[0].is_some());
                        entered += u32::from(noting.reads.generation != before);
                    }
                    kind => {
                        threads.meet(if kind < 18 { 0b111 } else { 1 + random.below(7) as u32 });
                        let before = noting.reads.generation;
                        noting.forget_reads(threads.known.iter());
                        forgotten += u32::from(noting.reads.generation != before);
                    }
                }
            }
        }
        assert!(conflicts > 500 && forgotten > 500 && entered > 500, "{conflicts} {forgotten} {entered}");
    }
}
