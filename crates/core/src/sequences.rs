//! Where the queries and keys of each sequence lie, once the lengths are known.

use std::ops::Range;

use crate::{
    Error, PageTable, Problem, SideInputs, Sizes,
    side::{check_slice, check_wanted},
};

/// The sequences of a problem with its lengths and pages: checked, so that every place it names is inside the tensors.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    sizes: Sizes,
    page: Option<usize>,
    cu_seqlens_q: Option<&'a [i32]>,
    cu_seqlens_kv: Option<&'a [i32]>,
    seqused_kv: Option<&'a [i32]>,
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
        let SideInputs { cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, .. } = *side;
        let batch = sizes.batch;
        check_slice(CU_Q, cu_seqlens_q.map(<[i32]>::len), lengths.packed_queries, batch + 1)?;
        check_slice(CU_KV, cu_seqlens_kv.map(<[i32]>::len), lengths.packed_keys, batch + 1)?;
        check_slice("used key lengths", seqused_kv.map(<[i32]>::len), lengths.used, batch)?;
        check_wanted("page table", page_table.is_some(), lengths.page.is_some())?;
        for (what, cu, longest, total) in
            [(CU_Q, cu_seqlens_q, sizes.seq_q, q_shape[2]), (CU_KV, cu_seqlens_kv, sizes.seq_kv, k_shape[2])]
        {
            cu.map_or(Ok(()), |cu| check_cumulative(what, cu, longest, total))?;
        }
        let page = lengths.page.map(crate::PageSize::tokens);
        let sequences = Self { sizes, page, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table };
        if let Some(used) = seqused_kv {
            for (sequence, &used) in used.iter().enumerate() {
                let capacity = sequences.capacity(sequence);
                if usize::try_from(used).map_or(true, |used| used > capacity) {
                    return Err(Error::UsedLength { sequence, used, capacity });
                }
            }
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
        match self.cu_seqlens_q {
            Some(cu) => cu[sequence] as usize..cu[sequence + 1] as usize,
            None => 0..self.sizes.seq_q,
        }
    }

    /// How many keys a sequence has.
    pub fn keys(&self, sequence: usize) -> usize {
        self.seqused_kv.map_or_else(|| self.capacity(sequence), |used| used[sequence] as usize)
    }

    /// Where a key of a sequence lies.
    #[inline]
    pub fn key(&self, sequence: usize, key: usize) -> KeyPlace {
        match (self.page_table, self.page, self.cu_seqlens_kv) {
            (Some(table), Some(page), _) => {
                // Checked when this was made.
                let batch = table.entries[sequence * table.row_stride + key / page] as usize;
                KeyPlace { batch, row: key % page }
            }
            (_, _, Some(cu)) => KeyPlace { batch: 0, row: cu[sequence] as usize + key },
            _ => KeyPlace { batch: sequence, row: key },
        }
    }

    /// How many keys a sequence has room for.
    fn capacity(&self, sequence: usize) -> usize {
        match self.cu_seqlens_kv {
            Some(cu) => (cu[sequence + 1] - cu[sequence]) as usize,
            None => self.sizes.seq_kv,
        }
    }

    fn check_pages(&self, table: PageTable<'_>, page: usize, pages: usize) -> Result<(), Error> {
        for sequence in 0..self.sizes.batch {
            for index in 0..self.keys(sequence).div_ceil(page) {
                let Some(entry) = table.page(sequence, index) else {
                    let (got, row_stride) = (table.entries.len(), table.row_stride);
                    return Err(Error::PageTable { got, row_stride, sequence, index });
                };
                if usize::try_from(entry).map_or(true, |entry| entry >= pages) {
                    return Err(Error::Page { sequence, index, page: entry, pages });
                }
            }
        }
        Ok(())
    }
}

const CU_Q: &str = "cumulative query lengths";
const CU_KV: &str = "cumulative key lengths";

fn check_cumulative(what: &'static str, cu: &[i32], longest: usize, total: usize) -> Result<(), Error> {
    let refuse = |at: usize, allowed: String| Err(Error::CuSeqlens { what, at, value: cu[at], allowed });
    if cu[0] < 0 {
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
