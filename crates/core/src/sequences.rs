//! Where the queries and keys of each sequence lie, once the lengths are known.

use std::ops::Range;

use crate::{
    Error, PageTable, Problem, SideInputs, Sizes,
    append::cache_row,
    side::{check_slice, check_wanted},
};

/// The sequences of a problem with its lengths and pages: checked, so that every place it names is inside the tensors.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    sizes: Sizes,
    page: Option<usize>,
    cu_seqlens_q: Option<&'a [i32]>,
    cu_seqlens_kv: Option<&'a [i32]>,
    seqused_q: Option<&'a [i32]>,
    seqused_kv: Option<&'a [i32]>,
    leftpad_kv: Option<&'a [i32]>,
    cache_batch_idx: Option<&'a [i32]>,
    page_table: Option<PageTable<'a>>,
}

/// A row of K and V: the index of its first and of its third dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPlace {
    /// Sequence, or page; 0 when keys are packed.
    pub batch: usize,
    /// Position in the sequence, the page, or among the packed keys.
    pub row: usize,
}

impl<'a> Sequences<'a> {
    /// Checks lengths and pages against tensors of these shapes.
    pub fn new(
        problem: &Problem,
        side: &SideInputs<'a>,
        q_shape: [usize; 4],
        k_shape: [usize; 4],
    ) -> Result<Self, Error> {
        let (sizes, lengths) = (problem.sizes(), problem.lengths());
        let SideInputs { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, .. } = *side;
        let SideInputs { leftpad_kv, cache_batch_idx, page_table, .. } = *side;
        let batch = sizes.batch;
        for (what, given, wanted, expected) in [
            (CU_Q, cu_seqlens_q, lengths.packed_queries, batch + 1),
            (CU_KV, cu_seqlens_kv, lengths.packed_keys, batch + 1),
            ("used query lengths", seqused_q, lengths.used_queries, batch),
            ("used key lengths", seqused_kv, lengths.used, batch),
            ("left paddings", leftpad_kv, lengths.left_padded, batch),
            ("cache batch indices", cache_batch_idx, lengths.indexed, batch),
        ] {
            check_slice(what, given.map(<[i32]>::len), wanted, expected)?;
        }
        check_wanted("page table", page_table.is_some(), lengths.page.is_some())?;
        for (what, cu, longest, total) in
            [(CU_Q, cu_seqlens_q, sizes.seq_q, q_shape[2]), (CU_KV, cu_seqlens_kv, sizes.seq_kv, k_shape[2])]
        {
            cu.map_or(Ok(()), |cu| check_cumulative(what, cu, longest, total))?;
        }
        let page = lengths.page.map(crate::PageSize::tokens);
        let sequences = Self {
            sizes,
            page,
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
            leftpad_kv,
            cache_batch_idx,
            page_table,
        };
        sequences.check_lengths()?;
        if cache_batch_idx.is_some() {
            let rows = page_table.map_or(k_shape[0], |table| table.rows(problem.pages_per_sequence()));
            (0..batch).try_for_each(|b| cache_row(cache_batch_idx, b, rows).map(drop))?;
        }
        if let (Some(table), Some(page)) = (page_table, page) {
            sequences.check_pages(table, page, k_shape[0])?;
        }
        Ok(sequences)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.sizes.batch
    }

    /// The first index of a sequence's queries, which all share it.
    pub fn query_batch(&self, sequence: usize) -> usize {
        if self.cu_seqlens_q.is_some() { 0 } else { sequence }
    }

    /// The rows of a sequence's queries: their third index.
    pub fn queries(&self, sequence: usize) -> Range<usize> {
        let room = self.query_room(sequence);
        match self.seqused_q {
            Some(used) => room.start..room.start + used[sequence] as usize,
            None => room,
        }
    }

    /// Rows of the output that belong to no sequence, of the `rows` that each block of it has: the block, and which rows.
    pub fn unowned(&self, rows: usize) -> Vec<(usize, Range<usize>)> {
        let mut unowned = Vec::new();
        let mut behind = 0;
        for sequence in 0..self.count() {
            let own = self.queries(sequence);
            match self.cu_seqlens_q {
                Some(_) => unowned.push((0, behind..own.start)),
                None => unowned.push((sequence, own.end..rows)),
            }
            behind = own.end;
        }
        if self.cu_seqlens_q.is_some() {
            unowned.push((0, behind..rows));
        }
        unowned.retain(|(_, rows)| !rows.is_empty());
        unowned
    }

    /// How many keys a sequence has, its left padding not among them.
    pub fn keys(&self, sequence: usize) -> usize {
        self.filled(sequence) - self.leftpad(sequence)
    }

    /// Where a key of a sequence lies.
    #[inline]
    pub fn key(&self, sequence: usize, key: usize) -> KeyPlace {
        let (key, block) = (key + self.leftpad(sequence), self.block(sequence));
        match (self.page_table, self.page, self.cu_seqlens_kv) {
            (Some(table), Some(page), _) => {
                // Checked when this was made.
                let batch = table.entries[block * table.row_stride + key / page] as usize;
                KeyPlace { batch, row: key % page }
            }
            (_, _, Some(cu)) => KeyPlace { batch: 0, row: cu[sequence] as usize + key },
            _ => KeyPlace { batch: block, row: key },
        }
    }

    /// The block of the cache, or the row of the page table, of a sequence.
    fn block(&self, sequence: usize) -> usize {
        self.cache_batch_idx.map_or(sequence, |index| index[sequence] as usize)
    }

    fn leftpad(&self, sequence: usize) -> usize {
        self.leftpad_kv.map_or(0, |leftpad| leftpad[sequence] as usize)
    }

    /// How many keys of a sequence's room are filled, its left padding among them.
    fn filled(&self, sequence: usize) -> usize {
        self.seqused_kv.map_or_else(|| self.capacity(sequence), |used| used[sequence] as usize)
    }

    /// The rows that a sequence has for queries.
    fn query_room(&self, sequence: usize) -> Range<usize> {
        match self.cu_seqlens_q {
            Some(cu) => cu[sequence] as usize..cu[sequence + 1] as usize,
            None => 0..self.sizes.seq_q,
        }
    }

    /// How many keys a sequence has room for.
    fn capacity(&self, sequence: usize) -> usize {
        match self.cu_seqlens_kv {
            Some(cu) => (cu[sequence + 1] - cu[sequence]) as usize,
            None => self.sizes.seq_kv,
        }
    }

    fn check_lengths(&self) -> Result<(), Error> {
        for sequence in 0..self.sizes.batch {
            for (what, used, capacity) in [
                ("queries", self.seqused_q, self.query_room(sequence).len()),
                ("keys", self.seqused_kv, self.capacity(sequence)),
            ] {
                let Some(used) = used.map(|used| used[sequence]) else { continue };
                if usize::try_from(used).map_or(true, |used| used > capacity) {
                    return Err(Error::UsedLength { sequence, used, what, capacity });
                }
            }
            if let Some(leftpad) = self.leftpad_kv.map(|leftpad| leftpad[sequence]) {
                let filled = self.filled(sequence);
                if usize::try_from(leftpad).map_or(true, |leftpad| leftpad > filled) {
                    return Err(Error::LeftPad { sequence, leftpad, filled });
                }
            }
        }
        Ok(())
    }

    fn check_pages(&self, table: PageTable<'_>, page: usize, pages: usize) -> Result<(), Error> {
        for sequence in 0..self.sizes.batch {
            let (first, end) = (self.leftpad(sequence) / page, self.filled(sequence).div_ceil(page));
            for index in first..end {
                table.place(sequence, self.block(sequence), index * page, page, pages)?;
            }
        }
        Ok(())
    }
}

const CU_Q: &str = "cumulative query lengths";
const CU_KV: &str = "cumulative key lengths";

/// Checks cumulative lengths of sequences of at most `longest` tokens, `total` in all.
pub fn check_cumulative(what: &'static str, cu: &[i32], longest: usize, total: usize) -> Result<(), Error> {
    let refuse = |at: usize, allowed: String| Err(Error::CuSeqlens { what, at, value: cu[at], allowed });
    if cu.first().is_some_and(|first| *first < 0) {
        return refuse(0, "0 or more".to_owned());
    }
    for at in 1..cu.len() {
        let (before, longest) = (i64::from(cu[at - 1]), longest as i64);
        let room = total as i64;
        let (least, most) = (before, room.min(before + longest));
        if !(least..=most).contains(&i64::from(cu[at])) {
            return refuse(
                at,
                format!("{least} to {most} (at most {longest} tokens a sequence and {total} in all)"),
            );
        }
    }
    Ok(())
}
