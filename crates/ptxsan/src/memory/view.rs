//! What a block (or a grid whose blocks talk to each other) sees of global memory while it runs.
//!
//! Pages are copied when they are first written, and written back when the launch ends. Blocks that run in parallel so
//! never see each other's stores: results do not depend on how the host schedules them.

use super::{DeviceMemory, PAGE_BYTES, mark_written};
use crate::hazard::shadow::Shadow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Page numbers are already well spread: multiply and be done.
#[derive(Default)]
pub(crate) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(u64::from(*b));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A map keyed by page number.
pub(crate) type PageMap<T> = HashMap<u64, T, BuildHasherDefault<PageHasher>>;

/// One page as the running blocks see it.
pub(crate) struct Page<'m> {
    allocation: u32,
    number: u64,
    /// Bytes of the page that belong to the allocation.
    pub(crate) valid: u32,
    pub(crate) is_freed: bool,
    pub(crate) is_read_only: bool,
    data: Bytes<'m>,
    written: Bytes<'m>,
    /// 1 where these blocks wrote; `None`: nowhere.
    dirty: Option<Box<[u8; PAGE_BYTES]>>,
    pub(crate) shadow: Shadow,
}

/// The bytes of a page, zeros behind the valid ones: the device's, or a copy of them.
enum Bytes<'m> {
    Shared(&'m [u8]),
    Own(Box<[u8]>),
}

impl Bytes<'_> {
    #[inline(always)]
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Shared(bytes) => bytes,
            Bytes::Own(bytes) => bytes,
        }
    }

    #[inline(always)]
    fn own(&mut self) -> &mut [u8] {
        if let Bytes::Shared(bytes) = self {
            *self = Bytes::Own((*bytes).into());
        }
        match self {
            Bytes::Own(bytes) => bytes,
            Bytes::Shared(_) => &mut [],
        }
    }
}

impl Page<'_> {
    /// Its bytes.
    #[inline(always)]
    pub(crate) fn data(&self) -> &[u8] {
        self.data.get()
    }

    /// 1 for each that was written.
    #[inline(always)]
    pub(crate) fn written(&self) -> &[u8] {
        self.written.get()
    }

    /// The same, to be changed.
    pub(crate) fn written_mut(&mut self) -> &mut [u8] {
        self.written.own()
    }

    /// Bytes that these blocks write: where they, and what is known of them, go.
    #[inline]
    pub(crate) fn put(&mut self, at: usize, data: &[u8]) {
        let range = at..at + data.len();
        self.data.own()[range.clone()].copy_from_slice(data);
        mark_written(&mut self.written.own()[range.clone()]);
        let dirty = self.dirty.get_or_insert_with(|| Box::new([0; PAGE_BYTES]));
        mark_written(&mut dirty[range]);
    }
}

/// What blocks that have run leave of a page.
pub(crate) struct UsedPage {
    allocation: u32,
    pub(crate) number: u64,
    pub(crate) shadow: Shadow,
    /// Its bytes, which of them something wrote, and which these blocks did; `None`: nothing was written.
    stored: Option<Stored>,
}

struct Stored {
    valid: usize,
    data: Box<[u8]>,
    written: Box<[u8]>,
    dirty: Box<[u8; PAGE_BYTES]>,
}

impl UsedPage {
    /// Its bytes, if some were written.
    pub(crate) fn data(&self) -> &[u8] {
        self.stored.as_ref().map_or(&[], |stored| &stored.data)
    }
}

impl From<Page<'_>> for UsedPage {
    fn from(mut page: Page<'_>) -> Self {
        let stored = page.dirty.take().map(|dirty| {
            let [data, written] = [&mut page.data, &mut page.written].map(|bytes| match bytes {
                Bytes::Own(bytes) => std::mem::take(bytes),
                Bytes::Shared(bytes) => (*bytes).into(),
            });
            Stored { valid: page.valid as usize, data, written, dirty }
        });
        UsedPage { allocation: page.allocation, number: page.number, shadow: page.shadow, stored }
    }
}

/// Pages touched so far.
pub(crate) struct View<'m> {
    base: &'m DeviceMemory,
    index: PageMap<u32>,
    pages: Vec<Page<'m>>,
    /// Pages asked for lately, by the last bits of their number.
    recent: [(u64, u32); RECENT],
}

/// So many pages are found without a search.
const RECENT: usize = 16;

impl<'m> View<'m> {
    pub(crate) fn new(base: &'m DeviceMemory) -> Self {
        View { base, index: PageMap::default(), pages: Vec::new(), recent: [(u64::MAX, 0); RECENT] }
    }

    pub(crate) fn base(&self) -> &'m DeviceMemory {
        self.base
    }

    /// The number of the page that holds `address`; `None` outside every allocation.
    #[inline]
    pub(crate) fn page(&mut self, address: u64) -> Option<u32> {
        let number = address / PAGE_BYTES as u64;
        let (last, slot) = self.recent[number as usize % RECENT];
        if last == number {
            return Some(slot);
        }
        let found = match self.index.get(&number) {
            Some(found) => *found,
            None => self.bring(number)?,
        };
        self.recent[number as usize % RECENT] = (number, found);
        Some(found)
    }

    #[inline]
    pub(crate) fn at(&mut self, page: u32) -> &mut Page<'m> {
        &mut self.pages[page as usize]
    }

    fn bring(&mut self, number: u64) -> Option<u32> {
        let start = number * PAGE_BYTES as u64;
        let (allocation, a) = self.base.nearest(start)?;
        if start >= a.end() {
            return None;
        }
        let from = (start - a.address) as usize;
        let valid = (a.data.len() - from).min(PAGE_BYTES);
        let bytes = |all: &'m [u8]| match &all[from..from + valid] {
            whole if valid == PAGE_BYTES => Bytes::Shared(whole),
            part => {
                let mut page = vec![0; PAGE_BYTES];
                page[..valid].copy_from_slice(part);
                Bytes::Own(page.into())
            }
        };
        let page = Page {
            allocation: allocation as u32,
            number,
            valid: valid as u32,
            is_freed: a.is_freed,
            is_read_only: a.is_read_only,
            data: bytes(&a.data),
            written: bytes(&a.written),
            dirty: None,
            shadow: Shadow::new(PAGE_BYTES),
        };
        let slot = self.pages.len() as u32;
        self.pages.push(page);
        self.index.insert(number, slot);
        Some(slot)
    }

    /// Ends the view and hands over what is left of its pages.
    pub(crate) fn into_pages(self) -> Vec<UsedPage> {
        self.pages.into_iter().map(UsedPage::from).collect()
    }
}

/// Writes a page's new bytes back.
pub(crate) fn write_back(page: &UsedPage, memory: &mut DeviceMemory) {
    let Some(stored) = &page.stored else { return };
    let allocation = memory.by_index_mut(page.allocation as usize);
    let start = (page.number * PAGE_BYTES as u64 - allocation.address) as usize;
    let mut at = 0;
    // Bytes that were written lie together, mostly.
    for dirty in stored.dirty[..stored.valid].chunk_by(|a, b| a == b) {
        let here = at..at + dirty.len();
        if dirty[0] != 0 {
            let there = start + here.start..start + here.end;
            allocation.data[there.clone()].copy_from_slice(&stored.data[here.clone()]);
            allocation.written[there].copy_from_slice(&stored.written[here]);
        }
        at += dirty.len();
    }
}
