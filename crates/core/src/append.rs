//! Where new keys and values go in a cache.

use std::collections::{HashMap, HashSet};

use crate::{Error, KeyPlace, PageTable, sequences::check_cumulative, side::check_slice};

/// New tokens for the sequences of a cache: those of sequence `b` go behind the `lengths[b]` it holds already.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewTokens<'a> {
    /// Tokens that each sequence holds, its left padding among them.
    pub lengths: &'a [i32],
    /// Where each sequence's new tokens begin among packed ones, `batch + 1` values; `None` when all have as many.
    pub cu_seqlens: Option<&'a [i32]>,
    /// Which pages are a sequence's, and how many entries a row has; `None` when each has one contiguous block.
    pub pages: Option<(PageTable<'a>, usize)>,
    /// Which block of the cache, or row of the page table, is a sequence's; the one of its own number when `None`.
    pub cache_batch_idx: Option<&'a [i32]>,
}

/// New tokens with their places in a cache: checked to be inside it, each a place of its own that no sequence holds.
#[derive(Clone, Debug)]
pub struct Placement {
    sequences: usize,
    rows: Vec<NewRow>,
    cache_shape: [usize; 4],
    new_shape: [usize; 4],
}

/// A row of new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRow {
    /// The sequence it belongs to.
    pub sequence: usize,
    /// Its number among the sequence's new tokens.
    pub number: usize,
    /// The position in the sequence that it gets.
    pub position: usize,
    /// Where it is among the new tokens: first and third index.
    pub from: KeyPlace,
    /// Where it goes.
    pub to: KeyPlace,
}

impl Placement {
    /// Checks lengths and pages against a cache and new tokens of these shapes: `[blocks or pages, heads, tokens, dim]`, and
    /// `[sequences, heads, tokens, dim]` or packed `[1, heads, all tokens, dim]`.
    pub fn new(
        tokens: &NewTokens<'_>,
        cache_shape: [usize; 4],
        new_shape: [usize; 4],
    ) -> Result<Self, Error> {
        let NewTokens { lengths, cu_seqlens, pages, cache_batch_idx } = *tokens;
        let batch = lengths.len();
        let blocks = if cu_seqlens.is_some() { 1 } else { batch };
        let expected = [blocks, cache_shape[1], new_shape[2], cache_shape[3]];
        if new_shape != expected {
            return Err(Error::TensorShape { tensor: "new tokens", got: new_shape, expected });
        }
        if let Some(cu) = cu_seqlens {
            check_slice(CU_NEW, Some(cu.len()), true, batch + 1)?;
            check_cumulative(CU_NEW, cu, new_shape[2], new_shape[2])?;
        }
        if let Some(index) = cache_batch_idx {
            check_slice("cache batch indices", Some(index.len()), true, batch)?;
        }
        let mut rows = Vec::new();
        for (sequence, &length) in lengths.iter().enumerate() {
            let block = cache_row(cache_batch_idx, sequence, cache_rows(pages, cache_shape))?;
            let (new_batch, new) = match cu_seqlens {
                Some(cu) => (0, cu[sequence] as usize..cu[sequence + 1] as usize),
                None => (sequence, 0..new_shape[2]),
            };
            let capacity =
                pages.map_or(cache_shape[2], |(_, columns)| columns.saturating_mul(cache_shape[2]));
            let start = match usize::try_from(length) {
                Ok(start) if start <= capacity => start,
                _ => return Err(Error::UsedLength { sequence, used: length, what: "keys", capacity }),
            };
            if start + new.len() > capacity {
                return Err(Error::CacheFull { sequence, held: start, new: new.len(), capacity });
            }
            for (number, row) in new.enumerate() {
                let position = start + number;
                let to = match pages {
                    None => KeyPlace { batch: block, row: position },
                    Some((table, _)) => {
                        table.place(sequence, block, position, cache_shape[2], cache_shape[0])?
                    }
                };
                let from = KeyPlace { batch: new_batch, row };
                rows.push(NewRow { sequence, number, position, from, to });
            }
        }
        let placement = Self { sequences: batch, rows, cache_shape, new_shape };
        placement.check_apart()?;
        if let Some((table, _)) = pages {
            placement.check_unread(tokens, table)?;
        }
        Ok(placement)
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Every new row, sequence by sequence.
    pub fn rows(&self) -> &[NewRow] {
        &self.rows
    }

    /// Refuses tensors that are not of the shapes this was made for; the head dimension may be another.
    pub fn check(&self, cache: [usize; 4], new: [usize; 4]) -> Result<(), Error> {
        let with_dim = |[a, b, c, _]: [usize; 4]| [a, b, c, cache[3]];
        for (tensor, got, expected) in
            [("cache", cache, with_dim(self.cache_shape)), ("new tokens", new, with_dim(self.new_shape))]
        {
            if got != expected {
                return Err(Error::TensorShape { tensor, got, expected });
            }
        }
        Ok(())
    }

    /// Refuses tokens past the last position that has angles; `first` is the position of each sequence's first new token, the one it
    /// gets in the cache when that is `None`.
    pub fn check_positions(&self, first: Option<&[i32]>, positions: usize) -> Result<(), Error> {
        if let Some(first) = first
            && first.len() != self.sequences
        {
            return Err(Error::RotaryFirst { got: first.len(), expected: self.sequences });
        }
        for row in &self.rows {
            let position = match first {
                None => row.position as i64,
                Some(first) => i64::from(first[row.sequence]) + row.number as i64,
            };
            check_position(row.sequence, position, positions)?;
        }
        Ok(())
    }

    fn check_apart(&self) -> Result<(), Error> {
        let mut taken = HashMap::with_capacity(self.rows.len());
        for NewRow { sequence, to, .. } in &self.rows {
            if let Some(other) = taken.insert((to.batch, to.row), *sequence) {
                return Err(Error::AppendTwice { sequence: *sequence, other, block: to.batch, row: to.row });
            }
        }
        Ok(())
    }

    /// No sequence may hold a token where a new one goes.
    fn check_unread(&self, tokens: &NewTokens<'_>, table: PageTable<'_>) -> Result<(), Error> {
        let room = self.cache_shape[2].max(1);
        let written: HashSet<usize> = self.rows.iter().map(|row| row.to.batch).collect();
        for (other, &held) in tokens.lengths.iter().enumerate() {
            // Checked to be 0 or more, and the index to be inside the table.
            let (held, block) = (held as usize, tokens.cache_batch_idx.map_or(other, |i| i[other] as usize));
            for at in 0..held.div_ceil(room) {
                let page = table.page(block, at).and_then(|page| usize::try_from(page).ok());
                let Some(page) = page.filter(|page| written.contains(page)) else { continue };
                let hit = |row: &&NewRow| row.to.batch == page && row.to.row < held - at * room;
                if let Some(NewRow { sequence, to, .. }) = self.rows.iter().find(hit) {
                    return Err(Error::AppendTwice { sequence: *sequence, other, block: page, row: to.row });
                }
            }
        }
        Ok(())
    }
}

/// Refuses a position that has no angles.
pub fn check_position(sequence: usize, position: i64, positions: usize) -> Result<(), Error> {
    if usize::try_from(position).is_ok_and(|position| position < positions) {
        return Ok(());
    }
    Err(Error::RotaryPosition { sequence, position, positions })
}

const CU_NEW: &str = "cumulative new lengths";

/// How many blocks, or rows of a page table, a sequence's may be one of.
fn cache_rows(pages: Option<(PageTable<'_>, usize)>, cache_shape: [usize; 4]) -> usize {
    pages.map_or(cache_shape[0], |(table, columns)| table.rows(columns))
}

/// The block, or row of the page table, of a sequence.
pub(crate) fn cache_row(index: Option<&[i32]>, sequence: usize, rows: usize) -> Result<usize, Error> {
    let index = index.map_or(sequence as i64, |index| i64::from(index[sequence]));
    match usize::try_from(index) {
        Ok(row) if row < rows => Ok(row),
        _ => Err(Error::CacheIndex { sequence, index, rows }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(
        tokens: &NewTokens<'_>,
        cache: [usize; 4],
        new: [usize; 4],
    ) -> Result<Vec<(usize, usize)>, String> {
        let placement = Placement::new(tokens, cache, new).map_err(|error| error.to_string())?;
        Ok(placement.rows().iter().map(|row| (row.to.batch, row.to.row)).collect())
    }

    #[test]
    fn new_tokens_go_behind_those_there_are() {
        let tokens = NewTokens { lengths: &[3, 0], ..NewTokens::default() };
        let two = placed(&tokens, [2, 1, 5, 8], [2, 1, 2, 8]);
        assert_eq!(two, Ok(vec![(0, 3), (0, 4), (1, 0), (1, 1)]));
        let indexed = NewTokens { cache_batch_idx: Some(&[4, 1]), ..tokens };
        assert_eq!(placed(&indexed, [5, 1, 5, 8], [2, 1, 1, 8]), Ok(vec![(4, 3), (1, 0)]));
        let packed = NewTokens { cu_seqlens: Some(&[0, 0, 3]), ..tokens };
        assert_eq!(placed(&packed, [2, 1, 5, 8], [1, 1, 3, 8]), Ok(vec![(1, 0), (1, 1), (1, 2)]));
        let table = PageTable { entries: &[6, 2, -1, 5, -1, -1], row_stride: 3 };
        let paged = NewTokens { pages: Some((table, 2)), ..tokens };
        assert_eq!(placed(&paged, [7, 1, 4, 8], [2, 1, 2, 8]), Ok(vec![(6, 3), (2, 0), (5, 0), (5, 1)]));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_values() {
        let tokens = NewTokens { lengths: &[3, 0], ..NewTokens::default() };
        let refused = |tokens: &NewTokens<'_>, cache, new| placed(tokens, cache, new).unwrap_err();
        let said = refused(&tokens, [2, 1, 4, 8], [2, 1, 2, 8]);
        assert!(said.contains("sequence 0 holds 3 tokens") && said.contains("for 4"), "{said}");
        assert!(refused(&tokens, [2, 1, 4, 8], [2, 2, 1, 8]).contains("[2, 1, 1, 8]"));
        assert!(refused(&tokens, [1, 1, 4, 8], [2, 1, 1, 8]).contains("sequence 1"));
        let negative = NewTokens { lengths: &[-1, 0], ..tokens };
        assert!(refused(&negative, [2, 1, 4, 8], [2, 1, 1, 8]).contains("-1 keys"));
        let twice = NewTokens { cache_batch_idx: Some(&[1, 1]), lengths: &[2, 2], ..tokens };
        let said = refused(&twice, [2, 1, 4, 8], [2, 1, 1, 8]);
        assert!(said.contains("sequences 1 and 0"), "{said}");
        let far = NewTokens { cache_batch_idx: Some(&[0, 2]), ..tokens };
        assert!(refused(&far, [2, 1, 4, 8], [2, 1, 1, 8]).contains("2"));
        let paged = |entries: &'static [i32]| NewTokens {
            pages: Some((PageTable { entries, row_stride: 2 }, 2)),
            ..tokens
        };
        assert!(refused(&paged(&[0, 1, 9, 2]), [4, 1, 4, 8], [2, 1, 1, 8]).contains("at 9"));
        // Sequence 1 writes where sequence 0 holds keys.
        let said = refused(&paged(&[0, 1, 0, 2]), [4, 1, 4, 8], [2, 1, 1, 8]);
        assert!(said.contains("sequences 1 and 0"), "{said}");
    }
}
