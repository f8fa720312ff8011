//! Side inputs of a call from Python: lengths, pages, modifiers, scales.

use evosdpa::{
    Blocks, Broadcast, Chunk, DType, Granularity, Kinds, Lengths, PageSize, PageTable, Problem, ScaleViews,
    Scores, SideInputs, Softcap, Types,
};

use evosdpa_core::Float;

use crate::{Call, Error, Operand, call};

/// What a call has beside its tensors. The default: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Side {
    /// Where each sequence's queries begin among packed ones: `batch + 1` 32-bit integers.
    pub cu_seqlens_q: Option<List>,
    /// The same for packed keys and values.
    pub cu_seqlens_kv: Option<List>,
    /// The most queries a sequence has, where they are packed.
    pub max_seqlen_q: Option<i64>,
    /// The most keys a sequence has, where they are packed.
    pub max_seqlen_kv: Option<i64>,
    /// How many queries of each sequence there are: 32-bit integers.
    pub seqused_q: Option<List>,
    /// How many keys of each sequence are filled: 32-bit integers.
    pub seqused_kv: Option<List>,
    /// How many of them come before its first: 32-bit integers.
    pub leftpad_kv: Option<List>,
    /// Which block of the cache, or row of the page table, is a sequence's: 32-bit integers.
    pub cache_batch_idx: Option<List>,
    /// Which pages are a sequence's: 32-bit integers.
    pub page_table: Option<Table>,
    /// A dense bias with the code of its type.
    pub bias: Option<(u8, Operand)>,
    /// Bytes, of which 0 hides a key.
    pub mask: Option<Operand>,
    /// Bytes of a block mask, contiguous, of which 0 hides a block of keys from a block of queries.
    pub blocks: Option<Operand>,
    /// Queries of a block.
    pub block_q: i64,
    /// Keys of a block.
    pub block_kv: i64,
    /// ALiBi's slopes: f32.
    pub alibi_slopes: Option<List>,
    /// Sink logits: f32.
    pub sinks: Option<List>,
    /// Scales of 8-bit queries, keys and values: f32.
    pub scales: [Option<List>; 3],
    /// How far one scale reaches.
    pub granularity: Granularity,
    /// The cap of a softcap.
    pub softcap: Option<f64>,
    /// Keys in an attention chunk.
    pub chunk: Option<i64>,
    /// Whether what only the plain baseline takes is refused.
    pub fast: bool,
    /// The code of the type of K and V; that of Q when `None`.
    pub kv_dtype: Option<u8>,
    /// The code of the type of O; the problem's own when `None`.
    pub o_dtype: Option<u8>,
}

/// A contiguous list of 32-bit values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    /// Address of the first.
    pub address: usize,
    /// How many there are.
    pub len: usize,
}

/// A table of 32-bit values with contiguous rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Address of the first.
    pub address: usize,
    /// Rows and columns.
    pub shape: [i64; 2],
    /// Values between the beginnings of two rows.
    pub row_stride: i64,
}

impl Side {
    /// The kinds of problem that this asks for. Precision is the call's, batch invariance the process's.
    pub(crate) fn kinds(&self, call: &Call<'_>) -> Result<Kinds, Error> {
        let page = match self.page_table {
            None => None,
            Some(_) => Some(PageSize::new(size("page size", call.k.shape[2])?).map_err(library)?),
        };
        let lengths = Lengths {
            packed_queries: self.cu_seqlens_q.is_some(),
            packed_keys: self.cu_seqlens_kv.is_some(),
            used: self.seqused_kv.is_some(),
            used_queries: self.seqused_q.is_some(),
            left_padded: self.leftpad_kv.is_some(),
            indexed: self.cache_batch_idx.is_some(),
            page,
        };
        let scores = Scores {
            softcap: self.softcap.map(|cap| Softcap::new(cap as f32)).transpose().map_err(library)?,
            alibi: self.alibi_slopes.is_some(),
            bias: self.bias.map(|(_, bias)| broadcast(&bias)),
            mask: self.mask.map(|mask| broadcast(&mask)),
            blocks: self.blocks.map(|table| self.block_sizes(&table)).transpose()?,
            chunk: match self.chunk {
                None => None,
                Some(keys) => Some(Chunk::new(size("attention chunk", keys)?).map_err(library)?),
            },
            sinks: self.sinks.is_some(),
        };
        let kv = self.kv_dtype.map(call::dtype).transpose()?;
        let types = Types {
            // Named only where it is another, so that the plain problem stays the plain one.
            kv: kv.filter(|kv| Some(*kv) != call::dtype(call.dtype).ok()),
            output: self.o_dtype.map(float).transpose()?,
            scales: self.granularity,
        };
        Ok(Kinds { lengths, scores, types, precision: call.precision, ..Kinds::default() })
    }

    fn block_sizes(&self, table: &Operand) -> Result<Blocks, Error> {
        let (queries, keys) = (size("query block", self.block_q)?, size("key block", self.block_kv)?);
        Blocks::new(queries, keys, table.shape[0] != 1, table.shape[1] != 1).map_err(library)
    }

    /// Sequences, the longest queries and the longest keys, where they are not in the tensors' shapes.
    pub(crate) fn lengths(
        &self,
        q: [usize; 4],
        k: [usize; 4],
    ) -> Result<(Option<usize>, usize, usize), Error> {
        let batch = self.cu_seqlens_q.map(|cu| cu.len.saturating_sub(1));
        let seq_q = match (self.cu_seqlens_q, self.max_seqlen_q) {
            (None, _) => q[2],
            (Some(_), Some(most)) => size("max_seqlen_q", most)?,
            (Some(_), None) => return Err(Error::LongestMissing { name: "max_seqlen_q" }),
        };
        let seq_kv = match (self.page_table, self.cu_seqlens_kv, self.max_seqlen_kv) {
            (Some(table), ..) => size("page table", table.shape[1])?.saturating_mul(k[2]),
            (None, None, _) => k[2],
            (None, Some(_), Some(most)) => size("max_seqlen_k", most)?,
            (None, Some(_), None) => return Err(Error::LongestMissing { name: "max_seqlen_k" }),
        };
        Ok((batch, seq_q, seq_kv))
    }

    /// What lies in this process's memory, to be read.
    ///
    /// # Safety
    /// Every element is valid to read for `'a`.
    pub(crate) unsafe fn inputs<'a>(&self, problem: &Problem) -> Result<SideInputs<'a>, Error> {
        // SAFETY: by contract.
        unsafe {
            let floats = |name, list: Option<List>| list.map(|list| list.read::<f32>(name)).transpose();
            Ok(SideInputs {
                alibi_slopes: floats("alibi_slopes", self.alibi_slopes)?,
                bias: match self.bias {
                    None => None,
                    Some((code, bias)) => Some(bias.view("bias", call::dtype(code)?)?),
                },
                mask: self.mask.map(|mask| mask.view("mask", DType::U8)).transpose()?,
                blocks: self.blocks.map(|table| table.view("block table", DType::U8)).transpose()?,
                sinks: floats("sinks", self.sinks)?,
                scales: ScaleViews {
                    q: floats("scales of Q", self.scales[0])?,
                    k: floats("scales of K", self.scales[1])?,
                    v: floats("scales of V", self.scales[2])?,
                },
                ..self.lists(problem)?
            })
        }
    }

    /// The part of [`Side::inputs`] that says where sequences are.
    ///
    /// # Safety
    /// Every element is valid to read for `'a`.
    pub(crate) unsafe fn lists<'a>(&self, problem: &Problem) -> Result<SideInputs<'a>, Error> {
        // SAFETY: by contract.
        unsafe {
            let integers = |name, list: Option<List>| list.map(|list| list.read::<i32>(name)).transpose();
            Ok(SideInputs {
                cu_seqlens_q: integers("cu_seqlens_q", self.cu_seqlens_q)?,
                cu_seqlens_kv: integers("cu_seqlens_k", self.cu_seqlens_kv)?,
                seqused_q: integers("seqused_q", self.seqused_q)?,
                seqused_kv: integers("seqused_k", self.seqused_kv)?,
                leftpad_kv: integers("leftpad_k", self.leftpad_kv)?,
                cache_batch_idx: integers("cache_batch_idx", self.cache_batch_idx)?,
                page_table: self.page_table.map(|table| table.read(problem)).transpose()?,
                ..SideInputs::default()
            })
        }
    }
}

impl List {
    /// # Safety
    /// The values are valid to read for `'a`, and any bits are a `T`.
    pub(crate) unsafe fn read<'a, T>(&self, name: &'static str) -> Result<&'a [T], Error> {
        // SAFETY: by contract.
        unsafe { slice(name, self.address, self.len) }
    }
}

impl Table {
    /// # Safety
    /// The values are valid to read for `'a`.
    unsafe fn read<'a>(&self, problem: &Problem) -> Result<PageTable<'a>, Error> {
        let (rows, batch) = (self.rows()?, problem.sizes().batch);
        if rows != batch && !problem.lengths().indexed {
            return Err(Error::TableRows { rows, batch });
        }
        // SAFETY: by contract.
        Ok(unsafe { self.entries() }?.0)
    }

    fn rows(&self) -> Result<usize, Error> {
        size("page table", self.shape[0])
    }

    /// The table, and how many entries a row has.
    ///
    /// # Safety
    /// The values are valid to read for `'a`.
    pub(crate) unsafe fn entries<'a>(&self) -> Result<(PageTable<'a>, usize), Error> {
        let (rows, columns) = (self.rows()?, size("page table", self.shape[1])?);
        let row_stride = size("row stride of the page table", self.row_stride)?;
        let len = rows.saturating_sub(1).saturating_mul(row_stride).saturating_add(columns);
        // SAFETY: by contract the last row ends with its last column.
        let entries = unsafe { slice("page table", self.address, len) }?;
        Ok((PageTable { entries, row_stride }, columns))
    }
}

/// # Safety
/// `len` values are valid to read for `'a`, and any bits are a `T`.
unsafe fn slice<'a, T>(name: &'static str, address: usize, len: usize) -> Result<&'a [T], Error> {
    if len == 0 {
        return Ok(&[]);
    }
    let most = isize::MAX as usize / size_of::<T>();
    if address == 0 || !address.is_multiple_of(align_of::<T>()) || len > most {
        return Err(Error::ListMemory { name, address, len });
    }
    // SAFETY: aligned, not null and not too long; the rest is by contract.
    Ok(unsafe { std::slice::from_raw_parts(address as *const T, len) })
}

/// What is written out, by the sizes that are not one.
pub(crate) fn broadcast(dense: &Operand) -> Broadcast {
    let [batch, heads, queries, _] = dense.shape;
    Broadcast { batch: batch != 1, heads: heads != 1, queries: queries != 1 }
}

fn float(code: u8) -> Result<Float, Error> {
    call::dtype(code)?.float().ok_or(Error::DTypeCode { code })
}

fn size(what: &'static str, value: i64) -> Result<usize, Error> {
    usize::try_from(value).map_err(|_| Error::NegativeCount { what, value })
}

fn library(error: evosdpa_core::Error) -> Error {
    evosdpa::Error::from(error).into()
}

#[cfg(test)]
mod tests {
    use evosdpa::Precision;

    use super::*;
    use crate::{Place, Visible};

    fn list<T>(values: &[T]) -> Option<List> {
        Some(List { address: values.as_ptr() as usize, len: values.len() })
    }

    /// A packed tensor `[first, 1, rows, 1]` of one head and one column, so that outputs are weighted means of numbers.
    fn column(data: &[f32], first: i64) -> Operand {
        let rows = data.len() as i64 / first;
        Operand { address: data.as_ptr() as usize, shape: [first, 1, rows, 1], strides: [rows, rows, 1, 1] }
    }

    /// The same to write to.
    fn column_mut(data: &mut [f32]) -> Operand {
        let address = data.as_mut_ptr() as usize;
        Operand { address, ..column(data, 1) }
    }

    fn call<'a>(q: Operand, k: Operand, v: Operand, o: Operand, side: &'a Side) -> Call<'a> {
        let visible = Visible { left: -1, right: -1, bottom_right: true };
        let precision = Precision::Default;
        Call { dtype: 0, q, k, v, o, lse: 0, scale: None, visible, precision, side: Some(side) }
    }

    fn run(call: &Call<'_>) -> Result<(), String> {
        // SAFETY: the tests describe vectors that are alive.
        unsafe { call.run(Place::Cpu { threads: 1 }) }.map_err(|error| error.to_string())
    }

    #[test]
    fn every_side_input_arrives() {
        // Zero queries: scores are what the modifiers make them.
        let (q, k, v) = ([0.0f32; 4], [0.0f32; 4], [1.0f32, 2.0, 3.0, 4.0]);
        let means = |side: Side| {
            let mut o = [f32::NAN; 4];
            run(&call(column(&q, 1), column(&k, 1), column(&v, 1), column_mut(&mut o), &side)).unwrap();
            o
        };
        let packed = [0i32, 1, 1, 4];
        let (cu, three) = (list(&packed), Some(3));
        let packed = Side {
            cu_seqlens_q: cu,
            cu_seqlens_kv: cu,
            max_seqlen_q: three,
            max_seqlen_kv: three,
            ..Side::default()
        };
        assert_eq!(means(packed), [1.0, 3.0, 3.0, 3.0]);
        assert_eq!(means(Side { seqused_kv: list(&[2i32]), ..Side::default() }), [1.5; 4]);
        assert_eq!(means(Side { chunk: Some(2), ..Side::default() }), [1.5, 1.5, 3.5, 3.5]);
        let visible = [1u8, 0, 0, 1];
        let mask = Operand { address: visible.as_ptr() as usize, shape: [1, 1, 1, 4], strides: [4, 4, 4, 1] };
        assert_eq!(means(Side { mask: Some(mask), ..Side::default() }), [2.5; 4]);
        let bias = [0.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0];
        let bias = Operand { address: bias.as_ptr() as usize, ..mask };
        assert_eq!(means(Side { bias: Some((0, bias)), ..Side::default() }), [2.5; 4]);
        // A sink of ln 4 weighs as much as four keys of score 0, a slope of ln 2 halves with every step.
        let halved = means(Side { sinks: list(&[4f32.ln()]), ..Side::default() });
        assert!(halved.iter().all(|x| (x - 1.25).abs() < 1e-6), "{halved:?}");
        let sloped = means(Side { alibi_slopes: list(&[2f32.ln()]), ..Side::default() });
        let wanted = (1.0 * 0.125 + 2.0 * 0.25 + 3.0 * 0.5 + 4.0) / 1.875;
        assert!((sloped[3] - wanted).abs() < 1e-5, "{sloped:?}");
        // Scores of 40 and 0 under a cap of ln 3: a weight of three to one.
        let (q, k, v) = ([1.0f32], [40.0f32, 0.0], [0.0f32, 4.0]);
        let (capped, mut o) = (Side { softcap: Some(3f64.ln()), ..Side::default() }, [f32::NAN]);
        run(&call(column(&q, 1), column(&k, 1), column(&v, 1), column_mut(&mut o), &capped)).unwrap();
        assert!((o[0] - 1.0).abs() < 1e-5, "{o:?}");
    }

    #[test]
    fn pages_and_codes_arrive() {
        let (q, k) = ([0.0f32], [0.0f32; 6]);
        let codes = [0x38u8, 0x40, 0x48, 0x50, 0x38, 0x38]; // 1, 2, 4, 8, 1, 1
        let mut o = [f32::NAN];
        let o_place = column_mut(&mut o);
        let entries = [2i32, 1];
        let table = Table { address: entries.as_ptr() as usize, shape: [1, 2], row_stride: 2 };
        let v = Operand { address: codes.as_ptr() as usize, ..column(&k, 3) };
        let side = Side {
            page_table: Some(table),
            seqused_kv: list(&[3i32]),
            kv_dtype: Some(3),
            scales: [None, list(&[1f32]), list(&[10f32])],
            ..Side::default()
        };
        run(&call(column(&q, 1), v, v, o_place, &side)).unwrap();
        assert_eq!(o[0], 20.0);
        let wrong = [2i32, 3];
        let outside = Side { page_table: Some(Table { address: wrong.as_ptr() as usize, ..table }), ..side };
        let said = run(&call(column(&q, 1), v, v, o_place, &outside)).unwrap_err();
        assert!(said.contains("at 3, but there are 3 pages"), "{said}");
        let rows = Side { page_table: Some(Table { shape: [2, 1], ..table }), ..side };
        let said = run(&call(column(&q, 1), v, v, o_place, &rows)).unwrap_err();
        assert!(said.contains("2 rows, but there are 1"), "{said}");
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_values() {
        let (x, mut o) = ([0.0f32; 4], [0.0f32; 4]);
        let o = column_mut(&mut o);
        let refused =
            |side: Side| run(&call(column(&x, 1), column(&x, 1), column(&x, 1), o, &side)).unwrap_err();
        let cu = [0i32, 4];
        let packed = Side { cu_seqlens_q: list(&cu), max_seqlen_q: Some(4), ..Side::default() };
        assert!(refused(Side { max_seqlen_q: None, ..packed }).contains("max_seqlen_q"));
        assert!(refused(Side { max_seqlen_q: Some(-4), ..packed }).contains("-4"));
        assert!(refused(Side { max_seqlen_q: Some(3), ..packed }).contains("0 to 3"));
        assert!(refused(Side { seqused_kv: list(&[5i32]), ..Side::default() }).contains("uses 5 keys"));
        assert!(refused(Side { softcap: Some(-1.0), ..Side::default() }).contains("-1"));
        assert!(refused(Side { chunk: Some(0), ..Side::default() }).contains("chunk is 0"));
        assert!(refused(Side { kv_dtype: Some(9), ..Side::default() }).contains("code 9"));
        assert!(refused(Side { o_dtype: Some(3), ..Side::default() }).contains("code 3"));
        let nowhere = Some(List { address: 6, len: 1 });
        assert!(refused(Side { sinks: nowhere, ..Side::default() }).contains("0x6"));
    }
}
