//! How long sequences are and where their keys lie.

use std::num::NonZeroUsize;

use crate::Error;

/// The largest page of a cache, in tokens.
pub const MAX_PAGE: usize = 256;

/// How a problem's lengths and its cache are given. The default: equal lengths, one contiguous block for each sequence.
///
/// The numbers themselves travel beside the tensors ([`crate::SideInputs`]), and a GPU may be the only one that knows them:
/// planning never needs them. The sizes of a problem are then the *longest* that can occur.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lengths {
    /// Queries of all sequences lie one behind the other, `[1, heads, total, dim]`; cumulative lengths say where each begins.
    pub packed_queries: bool,
    /// Keys and values likewise.
    pub packed_keys: bool,
    /// Each sequence has its own number of filled keys, in a cache that has room for more.
    pub used: bool,
    /// Each sequence has its own number of queries, in room for more.
    pub used_queries: bool,
    /// The first keys of each sequence's room are padding, a number of its own.
    pub left_padded: bool,
    /// Each sequence names the block of the cache, or the row of the page table, that is its own.
    pub indexed: bool,
    /// The cache is cut into pages of so many tokens; a table says which pages are a sequence's.
    pub page: Option<PageSize>,
}

/// Tokens in a page of a cache: 1 to [`MAX_PAGE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageSize(NonZeroUsize);

impl PageSize {
    /// Checks the range.
    pub fn new(tokens: usize) -> Result<Self, Error> {
        match NonZeroUsize::new(tokens) {
            Some(size) if tokens <= MAX_PAGE => Ok(Self(size)),
            _ => Err(Error::Size { what: "page size", value: tokens, allowed: "from 1 to 256" }),
        }
    }

    /// How many tokens a page holds.
    pub fn tokens(self) -> usize {
        self.0.get()
    }
}
