//! How long the sequences of a drawn problem are, and in which order its pages lie.

use std::{fmt, str::FromStr};

use evosdpa_core::{Error, Problem, error::nearest};

use super::{Family, listed::Listed};
use crate::rng::mix;

/// How lengths are drawn where they are data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LengthFamily {
    /// Every sequence is as long as the longest may be.
    Equal,
    /// Each about half as long as the one before it.
    Skewed,
    /// Of three sequences one has no keys, one is long, and one has no queries where they are packed.
    WithZeros,
    /// One token each, but for the last.
    OneToken,
    /// Those that were listed.
    Listed(Listed),
}

impl LengthFamily {
    /// Every family that is drawn.
    pub const ALL: [Self; 4] = [Self::Equal, Self::Skewed, Self::WithZeros, Self::OneToken];

    /// What options call it; nothing for lengths that are listed.
    fn name(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Skewed => "skewed",
            Self::WithZeros => "zeros",
            Self::OneToken => "one-token",
            Self::Listed(_) => "",
        }
    }

    /// The problem with packed tensors that have room for these lengths and no more. An error where they are not those of as many
    /// sequences as the problem has, or longer than its longest.
    pub fn fitted(self, problem: &Problem) -> Result<Problem, Error> {
        let Self::Listed(listed) = self else { return Ok(*problem) };
        let sizes = problem.sizes();
        if listed.count() != sizes.batch {
            let (lengths, count) = (listed.to_string(), listed.count());
            return Err(Error::LengthCount { lengths, count, batch: sizes.batch });
        }
        if listed.longest() > sizes.seq_kv {
            let (lengths, longest) = (listed.to_string(), listed.longest());
            return Err(Error::LengthTooLong { lengths, longest, keys: sizes.seq_kv });
        }
        let kinds = problem.lengths();
        // One for each sequence at least, so that other lengths can be drawn too.
        let tokens = |used: bool, spare: usize, longest: usize| {
            let each = (0..sizes.batch).map(|b| room(used, listed.length(b).min(longest), spare, longest));
            each.sum::<usize>().max(sizes.batch)
        };
        let queries = tokens(kinds.used_queries, SPARE_QUERIES, sizes.seq_q);
        Ok(problem.with_tokens(queries, tokens(kinds.used, SPARE_KEYS, sizes.seq_kv)))
    }

    /// The number of queries or keys of a sequence.
    fn length(self, sequence: usize, batch: usize, longest: usize, keys: bool) -> usize {
        match (self, sequence % 3) {
            (Self::Equal, _) => longest,
            (Self::Skewed, _) => (longest >> sequence.min(31)).max(1),
            (Self::WithZeros, 0) if keys => 0,
            (Self::WithZeros, 2) if !keys => 0,
            (Self::WithZeros, _) => longest.div_ceil(2),
            (Self::OneToken, _) if sequence + 1 == batch => longest,
            (Self::OneToken, _) => 1,
            // Of keys; there are as many queries, as far as a sequence may have them.
            (Self::Listed(listed), _) => listed.length(sequence).min(longest),
        }
    }
}

impl fmt::Display for LengthFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listed(listed) => listed.fmt(f),
            family => f.write_str(family.name()),
        }
    }
}

impl FromStr for LengthFamily {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            return text.parse().map(Self::Listed);
        }
        Self::ALL.into_iter().find(|family| family.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "lengths",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|family| family.name())),
            allowed: format!("{}, or a list such as 2x2048,60x1", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// In which order pages lie in a drawn cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageOrder {
    /// One after the other, sequence by sequence.
    InOrder,
    /// The first page last.
    Reversed,
    /// Drawn with the seed.
    Random,
    /// All sequences begin with the same pages, as far as they are full in all of them; in order otherwise.
    SharedPrefix,
}

impl PageOrder {
    /// Every order.
    pub const ALL: [Self; 4] = [Self::InOrder, Self::Reversed, Self::Random, Self::SharedPrefix];
}

/// Lengths and page order of a drawn problem; of no account where neither is data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrangement {
    /// The lengths.
    pub lengths: LengthFamily,
    /// The pages.
    pub pages: PageOrder,
}

impl Arrangement {
    /// Every sequence as long as its problem says, its pages anywhere: what is timed, so that work and time are of one problem.
    pub const FULL: Self = Self::timed(LengthFamily::Equal);

    /// Lengths of a family, pages anywhere.
    pub const fn timed(lengths: LengthFamily) -> Self {
        Self { lengths, pages: PageOrder::Random }
    }

    /// Queries and keys of each sequence of a problem that is arranged so, padding not among them.
    pub fn lengths_of(self, problem: &Problem) -> Vec<(usize, usize)> {
        Places::new(problem, self, 0).lengths
    }

    /// One that differs from family to family and seed to seed, so that cases between them see every combination.
    pub fn of(family: Family, seed: u64) -> Self {
        let case = family as usize + CASES_A_SEED * (seed % 16) as usize;
        Self { lengths: LengthFamily::ALL[(1 + case) % 4], pages: PageOrder::ALL[(2 + case / 4) % 4] }
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} lengths, {:?} pages", self.lengths, self.pages)
    }
}

/// How far apart two seeds are. Whatever families there are: with one more, all other cases stay what they were.
const CASES_A_SEED: usize = 10;

/// What packed sequences that are only partly used have room for beside.
const SPARE_QUERIES: usize = 2;
const SPARE_KEYS: usize = 3;

/// The room of a packed sequence.
fn room(partly_used: bool, length: usize, spare: usize, longest: usize) -> usize {
    if partly_used { (length + spare).min(longest) } else { length }
}

/// The sequence and the position that a place in a tensor belongs to.
type Owner = Option<(usize, usize)>;

/// What one sequence has.
struct Room {
    queries: usize,
    /// Keys before its first, and the end of its last.
    leftpad: usize,
    filled: usize,
    /// The block of the cache, or the row of the page table.
    block: usize,
}

/// Lengths and pages, and whose each place is.
pub(super) struct Places {
    pub(super) cu_seqlens_q: Option<Vec<i32>>,
    pub(super) cu_seqlens_kv: Option<Vec<i32>>,
    pub(super) seqused_q: Option<Vec<i32>>,
    pub(super) seqused_kv: Option<Vec<i32>>,
    pub(super) leftpad_kv: Option<Vec<i32>>,
    pub(super) cache_batch_idx: Option<Vec<i32>>,
    pub(super) page_table: Option<Vec<i32>>,
    /// Whose the rows of Q are, by first and third index; `None` when they are where they seem to be.
    queries: Option<Vec<Owner>>,
    /// Whose the rows of K and V are.
    keys: Option<Vec<Owner>>,
    /// Queries and keys of each sequence, padding not among them.
    lengths: Vec<(usize, usize)>,
    shared: bool,
}

impl Places {
    pub(super) fn new(problem: &Problem, arrangement: Arrangement, seed: u64) -> Self {
        let (sizes, kinds) = (problem.sizes(), problem.lengths());
        let family = arrangement.lengths;
        let batch = sizes.batch;
        // Where packed tensors have room for listed lengths only, others are drawn to fit.
        let drawn = |packed: bool, tokens: usize, longest: usize| match family {
            LengthFamily::Listed(_) => longest,
            _ if packed => longest.min(tokens / batch),
            _ => longest,
        };
        let longest_q = drawn(kinds.packed_queries, problem.q_shape()[2], sizes.seq_q);
        let longest_kv = drawn(kinds.packed_keys, problem.k_shape()[2], sizes.seq_kv);
        let keys_are_data = kinds.packed_keys || kinds.used;
        let shared = kinds.page.is_some() && arrangement.pages == PageOrder::SharedPrefix;
        let rooms: Vec<Room> = (0..batch)
            .map(|b| {
                let queries = if kinds.packed_queries || kinds.used_queries {
                    family.length(b, batch, longest_q, false)
                } else {
                    sizes.seq_q
                };
                let filled =
                    if keys_are_data { family.length(b, batch, longest_kv, true) } else { sizes.seq_kv };
                // Who shares keys must agree where they begin.
                let padding = if shared { 2 } else { (3 * b + 2) % 7 };
                let leftpad = if kinds.left_padded { padding.min(filled) } else { 0 };
                let block = if kinds.indexed { (b + 1) % batch } else { b };
                Room { queries, leftpad, filled, block }
            })
            .collect();
        let query_room = |r: &Room| room(kinds.used_queries, r.queries, SPARE_QUERIES, longest_q);
        let key_room = |r: &Room| room(kinds.used, r.filled, SPARE_KEYS, longest_kv);
        let each = |asked: bool, value: fn(&Room) -> usize| {
            asked.then(|| rooms.iter().map(|room| value(room) as i32).collect::<Vec<_>>())
        };
        let page = kinds.page.map(|page| page.tokens());
        let mut places = Self {
            cu_seqlens_q: kinds.packed_queries.then(|| cumulative(rooms.iter().map(query_room))),
            cu_seqlens_kv: kinds.packed_keys.then(|| cumulative(rooms.iter().map(key_room))),
            seqused_q: each(kinds.used_queries, |room| room.queries),
            seqused_kv: each(kinds.used, |room| room.filled),
            leftpad_kv: each(kinds.left_padded, |room| room.leftpad),
            cache_batch_idx: each(kinds.indexed, |room| room.block),
            page_table: page.map(|page| page_table(problem, arrangement.pages, seed, page, &rooms)),
            queries: None,
            keys: None,
            lengths: rooms.iter().map(|room| (room.queries, room.filled - room.leftpad)).collect(),
            shared,
        };
        if kinds.packed_queries || kinds.used_queries {
            let [blocks, _, rows, _] = problem.q_shape();
            let cu = places.cu_seqlens_q.as_deref();
            let place = |b: usize, i: usize| cu.map_or(b * rows, |cu| cu[b] as usize) + i;
            places.queries = Some(owners(blocks * rows, &places.lengths, |l| l.0, place));
        }
        if keys_are_data || page.is_some() || kinds.left_padded || kinds.indexed {
            let [blocks, _, rows, _] = problem.k_shape();
            let entries = problem.pages_per_sequence();
            let place = |b: usize, j: usize| {
                let (block, j) = (rooms[b].block, rooms[b].leftpad + j);
                match (&places.page_table, page, &places.cu_seqlens_kv) {
                    (Some(table), Some(page), _) => {
                        table[block * entries + j / page] as usize * rows + j % page
                    }
                    (_, _, Some(cu)) => cu[b] as usize + j,
                    _ => block * rows + j,
                }
            };
            places.keys = Some(owners(blocks * rows, &places.lengths, |l| l.1, place));
        }
        places
    }

    /// Whether lengths or pages are data at all.
    pub(super) fn are_plain(&self) -> bool {
        self.queries.is_none() && self.keys.is_none()
    }

    /// Whose row `row` of block `block` of Q is, where the tensor has so many rows a block.
    pub(super) fn query(&self, block: usize, row: usize, rows: usize) -> Owner {
        self.queries.as_ref().map_or(Some((block, row)), |owners| owners[block * rows + row])
    }

    /// The same for K and V.
    pub(super) fn key(&self, block: usize, row: usize, rows: usize) -> Owner {
        self.keys.as_ref().map_or(Some((block, row)), |owners| owners[block * rows + row])
    }

    /// The number of keys of a sequence.
    pub(super) fn keys_of(&self, sequence: usize) -> usize {
        self.lengths[sequence].1
    }

    /// For each place of K, whether it holds a key that no query of its sequence sees. A page that several sequences
    /// share is left out: who does not see its keys may share them with one who does.
    pub(super) fn unseen(&self, problem: &Problem) -> Vec<bool> {
        let [blocks, _, rows, _] = problem.k_shape();
        let seen: Vec<Vec<bool>> = self
            .lengths
            .iter()
            .map(|&(queries, keys)| {
                let mut seen = vec![false; keys];
                (0..queries).for_each(|i| seen[problem.visible(i, queries, keys)].fill(true));
                seen
            })
            .collect();
        (0..blocks * rows)
            .map(|place| match self.key(place / rows, place % rows, rows) {
                Some((sequence, key)) => !self.shared && !seen[sequence][key],
                None => false,
            })
            .collect()
    }
}

fn cumulative(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let ends = lengths.scan(0, |end, length| {
        *end += length as i32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn owners(
    places: usize,
    lengths: &[(usize, usize)],
    length: impl Fn(&(usize, usize)) -> usize,
    place: impl Fn(usize, usize) -> usize,
) -> Vec<Owner> {
    let mut owners = vec![None; places];
    for (sequence, lengths) in lengths.iter().enumerate() {
        for i in 0..length(lengths) {
            // The first of several sequences that share a page gives it its keys.
            owners[place(sequence, i)].get_or_insert((sequence, i));
        }
    }
    owners
}

/// `[batch, pages of the longest]`; −1 where a sequence has no page.
fn page_table(problem: &Problem, order: PageOrder, seed: u64, page: usize, rooms: &[Room]) -> Vec<i32> {
    let (entries, pages) = (problem.pages_per_sequence(), problem.k_shape()[0]);
    let mut places: Vec<i32> = (0..pages as i32).collect();
    match order {
        PageOrder::InOrder | PageOrder::SharedPrefix => {}
        PageOrder::Reversed => places.reverse(),
        PageOrder::Random => {
            for i in (1..pages).rev() {
                places.swap(i, (mix(seed ^ mix(i as u64)) % (i as u64 + 1)) as usize);
            }
        }
    }
    let filled = rooms.iter().map(|room| room.filled);
    let full_in_all = filled.filter(|&filled| filled > 0).map(|filled| filled / page).min().unwrap_or(0);
    let shared = if order == PageOrder::SharedPrefix { full_in_all.div_ceil(2) } else { 0 };
    let mut table = vec![-1; problem.sizes().batch * entries];
    for (sequence, room) in rooms.iter().enumerate() {
        for i in 0..room.filled.div_ceil(page) {
            let owner = if i < shared { 0 } else { sequence };
            table[room.block * entries + i] = places[owner * entries + i];
        }
    }
    table
}
