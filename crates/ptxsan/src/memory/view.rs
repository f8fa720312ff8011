//! What a block (or a grid whose blocks talk to each other) sees of global memory while it runs.
//!
//! Pages are copied on first touch and written back when the launch ends. Blocks that run in parallel so
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
pub(crate) struct Page {
    pub(crate) allocation: u32,
    pub(crate) number: u64,
    /// Bytes of the page that belong to the allocation.
    pub(crate) valid: u32,
    pub(crate) is_freed: bool,
    pub(crate) is_read_only: bool,
    pub(crate) data: Box<[u8; PAGE_BYTES]>,
    pub(crate) written: Box<[u8; PAGE_BYTES]>,
    /// 1 where these blocks wrote; `None`: nowhere.
    dirty: Option<Box<[u8; PAGE_BYTES]>>,
    pub(crate) shadow: Shadow,
}

impl Page {
    /// Bytes that these blocks write: where they, and what is known of them, go.
    #[inline]
    pub(crate) fn put(&mut self, at: usize, data: &[u8]) {
        let range = at..at + data.len();
        self.data[range.clone()].copy_from_slice(data);
        mark_written(&mut self.written[range.clone()]);
        let dirty = self.dirty.get_or_insert_with(|| Box::new([0; PAGE_BYTES]));
        mark_written(&mut dirty[range]);
    }
}

/// Pages touched so far.
pub(crate) struct View<'m> {
    base: &'m DeviceMemory,
    index: PageMap<u32>,
    pages: Vec<Page>,
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
    pub(crate) fn at(&mut self, page: u32) -> &mut Page {
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
        let copy = |source: &[u8]| {
            let source = &source[from..from + valid];
            // A whole page, which most are, is not filled with zeros first.
            source.to_vec().into_boxed_slice().try_into().unwrap_or_else(|_| {
                let mut page = Box::new([0u8; PAGE_BYTES]);
                page[..valid].copy_from_slice(source);
                page
            })
        };
        let page = Page {
            allocation: allocation as u32,
            number,
            valid: valid as u32,
            is_freed: a.is_freed,
            is_read_only: a.is_read_only,
            data: copy(&a.data),
            written: copy(&a.written),
            dirty: None,
            shadow: Shadow::new(PAGE_BYTES),
        };
        let slot = self.pages.len() as u32;
        self.pages.push(page);
        self.index.insert(number, slot);
        Some(slot)
    }

    /// Ends the view and hands over its pages.
    pub(crate) fn into_pages(self) -> Vec<Page> {
        self.pages
    }
}

/// Writes a page's new bytes back.
pub(crate) fn write_back(page: &Page, memory: &mut DeviceMemory) {
    let Some(dirty) = &page.dirty else { return };
    let allocation = memory.by_index_mut(page.allocation as usize);
    let start = (page.number * PAGE_BYTES as u64 - allocation.address) as usize;
    for i in 0..page.valid as usize {
        if dirty[i] != 0 {
            allocation.data[start + i] = page.data[i];
            allocation.written[start + i] = page.written[i];
        }
    }
}
