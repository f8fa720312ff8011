//! Brings the results of blocks that ran apart together, in order, and finds where they touched the same bytes.
//!
//! Blocks of such a launch share no synchronisation at all, so any two accesses to one byte by different
//! blocks, one of them a write, are a race.

use super::world::Remains;
use crate::count::counters::Tally;
use crate::decode::Kernel;
use crate::finding::{Kind, Severity};
use crate::hazard::clock::Numbering;
use crate::hazard::log::{Log, Other, Words};
use crate::memory::view::{PageMap, UsedPage, write_back};
use crate::memory::{DeviceMemory, PAGE_BYTES};

/// Who touched a byte first, and with which instruction; nobody: `pc` is `u32::MAX`.
#[derive(Clone, Copy)]
struct First {
    /// The world they ran in, by its place in [`Fold::worlds`].
    world: u32,
    who: u32,
    pc: u32,
    /// A writer whose block had read the place before: the order of the blocks shows.
    saw: bool,
}

const SAME_VALUE: &str =
    "both blocks store the same value, so the result does not depend on the order; let one of them store it";
const UNORDERED_BLOCKS: &str = "nothing orders the two blocks: give each its own bytes, or order them by an atomic with a fence \
                                (__threadfence) on both sides";

const NOBODY: First = First { world: 0, who: 0, pc: u32::MAX, saw: false };

/// First writer and first reader of every cell of a page; cells as small as any access of it needs.
struct FoldPage {
    /// log2 of the bytes of a cell.
    shift: u32,
    /// None as long as nothing was written.
    writers: Vec<First>,
    readers: Vec<First>,
    /// Cells without a reader.
    unread: usize,
}

impl FoldPage {
    fn new(shift: u32) -> Self {
        let count = PAGE_BYTES >> shift;
        FoldPage { shift, writers: Vec::new(), readers: vec![NOBODY; count], unread: count }
    }

    /// Splits cells that are too large; each part inherits the whole.
    fn refine(&mut self, shift: u32) {
        if shift < self.shift {
            let parts = 1 << (self.shift - shift);
            for cells in [&mut self.writers, &mut self.readers] {
                *cells = cells.iter().flat_map(|c| std::iter::repeat_n(*c, parts)).collect();
            }
            self.unread *= parts;
            self.shift = shift;
        }
    }
}

impl FoldPage {
    /// A page that has not been written yet.
    fn add_readers(&mut self, page: &UsedPage, world: u32) {
        if self.unread == 0 {
            return;
        }
        let mut added = 0;
        page.shadow.for_each_read(|offset, bytes, who, pc| {
            let range = (offset >> self.shift) as usize..((offset + bytes) >> self.shift) as usize;
            for reader in self.readers[range].iter_mut().filter(|reader| reader.pc == u32::MAX) {
                *reader = First { world, who, pc, saw: false };
                added += 1;
            }
        });
        self.unread -= added;
    }
}

/// The launch's results so far.
pub(super) struct Fold {
    pub(super) log: Log,
    pub(super) tallies: Vec<Tally>,
    pub(super) output: String,
    pub(super) instructions: u64,
    pub(super) is_stopped: bool,
    touched: PageMap<FoldPage>,
    /// The first block of each world.
    worlds: Vec<u64>,
    checks: bool,
    numbering: Numbering,
}

impl Fold {
    pub(super) fn new(kernel: &Kernel, checks: bool, numbering: Numbering) -> Self {
        Fold {
            log: Log::default(),
            tallies: vec![Tally::default(); kernel.code.len()],
            output: String::new(),
            instructions: 0,
            is_stopped: false,
            touched: PageMap::default(),
            worlds: Vec::new(),
            checks,
            numbering,
        }
    }

    pub(super) fn add(&mut self, remains: Remains, memory: &mut DeviceMemory) {
        self.worlds.push(remains.first_block);
        for page in &remains.pages {
            if self.checks {
                self.compare(page, memory);
            }
            write_back(page, memory);
        }
        for (mine, theirs) in self.tallies.iter_mut().zip(&remains.tallies) {
            mine.add(theirs);
        }
        self.log.absorb(remains.log, remains.first_block);
        self.output.push_str(&remains.output);
        self.instructions += remains.instructions;
        self.is_stopped |= remains.is_stopped;
    }

    /// Holds a page of the last world against those before it.
    fn compare(&mut self, page: &UsedPage, memory: &DeviceMemory) {
        let world = self.worlds.len() as u32 - 1;
        let Some(shift) = page.shadow.smallest() else { return };
        let known = self.touched.entry(page.number).or_insert_with(|| FoldPage::new(shift));
        known.refine(shift);
        if page.shadow.is_written() && known.writers.is_empty() {
            known.writers = vec![NOBODY; known.readers.len()];
        }
        if known.writers.is_empty() {
            known.add_readers(page, world);
            return;
        }
        for cell in page.shadow.touched() {
            let first = |(who, pc): (u32, u32)| First { world, who, pc, saw: cell.saw };
            let (write, read) = (cell.write.map(first), cell.read.map(first));
            let mut found: Option<(First, First, bool)> = None;
            let range =
                (cell.offset >> known.shift) as usize..((cell.offset + cell.bytes) >> known.shift) as usize;
            for at in range {
                let reader = &mut known.readers[at];
                let mut nobody = NOBODY;
                let writer = known.writers.get_mut(at).unwrap_or(&mut nobody);
                if let Some(mine) = write {
                    if writer.pc != u32::MAX {
                        found = found.or(Some((mine, *writer, true)));
                    } else {
                        if reader.pc != u32::MAX {
                            found = found.or(Some((mine, *reader, false)));
                        }
                        *writer = mine;
                    }
                }
                if let Some(mine) = read {
                    if writer.pc != u32::MAX && writer.world != world {
                        found = found.or(Some((mine, *writer, true)));
                    }
                    if reader.pc == u32::MAX {
                        *reader = mine;
                        known.unread -= 1;
                    }
                }
            }
            if let Some((mine, other, other_wrote)) = found {
                let address = page.number * PAGE_BYTES as u64 + u64::from(cell.offset);
                let verb = |write: bool| if write { "write" } else { "read" };
                let is_write = write.is_some_and(|w| w.pc == mine.pc);
                let range = cell.offset as usize..(cell.offset + cell.bytes) as usize;
                let mine_there = page.data().get(range);
                let is_same = || mine_there.is_some_and(|data| memory.holds(address, data));
                let agrees = is_write && other_wrote && !mine.saw && !other.saw && is_same();
                let severity = if agrees { Severity::Info } else { Severity::Error };
                let at = |first: &First| {
                    let block =
                        self.worlds[first.world as usize] + u64::from(self.numbering.block_of(first.who));
                    (block, self.numbering.thread_of(first.who))
                };
                let (block, thread) = at(&other);
                let (other, at) = (Other { pc: other.pc, block, thread }, at(&mine));
                self.log.add_at(Kind::Race, severity, mine.pc, Some(other), at, || Words {
                    detail: format!(
                        "{} of {} bytes at global {address:#x}{} and a {} by another block",
                        verb(is_write),
                        cell.bytes,
                        memory.locate(address),
                        verb(other_wrote),
                    ),
                    advice: Some(if agrees { SAME_VALUE } else { UNORDERED_BLOCKS }.to_owned()),
                    variable: memory.variable(address),
                });
            }
        }
    }
}
