//! What depends on the forms of a call's tensors alone, cached by them from the first such call on: the plan, and the forms of the
//! outputs.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
    sync::{Arc, Mutex, PoisonError},
};

use evosdpa::{
    Attention, Device, DeviceTensors, Options, Precision, SideInputs,
    gpu::{self, DeviceSide, RawStream},
};
use pyo3::prelude::*;

use crate::{
    Call, Error, List, Operand, Side, Visible,
    call::{self, caught, sizes},
    exit::detached,
    library::Form,
    module::raised,
};

/// Past this many forms all are looked at anew.
const KNOWN_MAX: usize = 4096;

/// What a call asks for beside its tensors.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) scale: Option<f64>,
    pub(crate) visible: Visible,
    pub(crate) enable_gqa: bool,
    /// `[batch, sequence, heads, head dimension]` instead of `[batch, heads, sequence, head dimension]`.
    pub(crate) flash_layout: bool,
    /// The output as `[batch, sequence, heads, head dimension]`, packed, however the tensors lie.
    pub(crate) out_by_token: bool,
    /// Queries and output without a sequence, which is of one.
    pub(crate) one_query: bool,
    pub(crate) with_lse: bool,
    pub(crate) precision: Precision,
}

/// All that a plan depends on: the tensors without their addresses.
#[derive(PartialEq)]
pub(crate) struct Key {
    /// Shapes and strides of Q, K and V.
    forms: [([i64; 4], [i64; 4]); 3],
    dtype: u8,
    gpu: Option<usize>,
    /// 0 on a GPU.
    threads: usize,
    wanted: Wanted,
    batch_invariant: bool,
    beside: Beside,
}

/// What of a [`Side`] a plan depends on.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Beside {
    /// A bit for each list that there is.
    lists: u16,
    sequences: usize,
    longest: [i64; 2],
    /// Rows and columns of the page table, and the step from row to row.
    table: [i64; 3],
    kv_dtype: u8,
    /// The type, sizes and strides of a mask or bias; of a mask that of no bias.
    dense: Option<(u8, [i64; 4], [i64; 4])>,
    /// The bits of a cap's number; 0 without one.
    softcap: u64,
    /// 0 for none.
    chunk: i64,
}

/// What is known from the first call with such tensors.
pub(crate) struct Known {
    attention: Attention,
    /// Forms of the outputs.
    pub(crate) out: Form,
    pub(crate) lse: Option<Form>,
    /// The output's sizes and strides, `[batch, heads, sequence, head dimension]`.
    o: Operand,
    /// The tensors on a GPU, without their addresses.
    tensors: Option<DeviceTensors>,
}

/// The forms of a call's outputs, as torch takes them and, of O, as `[batch, heads, sequence, head dimension]`.
pub(crate) struct OutputForms {
    pub(crate) out: Form,
    pub(crate) lse: Option<Form>,
    pub(crate) shape: [i64; 4],
    pub(crate) strides: [i64; 4],
}

type AllKnown = HashMap<Key, Arc<Known>, BuildHasherDefault<Mix>>;

/// `None` before the first call.
static KNOWN: Mutex<Option<AllKnown>> = Mutex::new(None);

impl Key {
    /// Of Q, K and V, in whatever order of dimensions `wanted` says.
    pub(crate) fn new(
        tensors: [&Operand; 3],
        dtype: u8,
        gpu: Option<usize>,
        threads: usize,
        wanted: Wanted,
        side: Option<&Side>,
    ) -> Self {
        let forms = tensors.map(|tensor| (tensor.shape, tensor.strides));
        let (batch_invariant, beside) =
            (call::is_batch_invariant(), side.map(Beside::of).unwrap_or_default());
        Self { forms, dtype, gpu, threads, wanted, batch_invariant, beside }
    }

    pub(crate) fn look_up(&self) -> Option<Arc<Known>> {
        KNOWN.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(self).cloned()
    }

    /// Plans such a call: Q, K and V as `[batch, heads, sequence, head dimension]`.
    #[cold]
    pub(crate) fn plan(
        self,
        py: Python<'_>,
        [q, k, v]: [Operand; 3],
        side: Option<&Side>,
        outputs: OutputForms,
    ) -> PyResult<Arc<Known>> {
        let OutputForms { out, lse, shape, strides } = outputs;
        let Wanted { scale, visible, precision, .. } = self.wanted;
        // Of the outputs there is only the form yet; their memory will be as aligned as the queries'.
        let o = Operand { address: q.address, shape, strides };
        let lse_address = if lse.is_some() { q.address } else { 0 };
        let call = Call { dtype: self.dtype, q, k, v, o, lse: lse_address, scale, visible, precision, side };
        let (gpu, threads) = (self.gpu, self.threads);
        let (attention, tensors) = detached(py, || caught(|| call.planned(gpu, threads))).map_err(raised)?;
        let known = Arc::new(Known { attention, out, lse, o, tensors });
        let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        if all.len() >= KNOWN_MAX {
            all.clear();
        }
        all.insert(self, Arc::clone(&known));
        Ok(known)
    }
}

impl Beside {
    /// Of a side that has no table of blocks, no scales of queries and no types of its own for the output.
    fn of(side: &Side) -> Self {
        let lists = [
            side.cu_seqlens_q,
            side.cu_seqlens_kv,
            side.seqused_q,
            side.seqused_kv,
            side.leftpad_kv,
            side.cache_batch_idx,
            side.scales[1],
            side.scales[2],
            side.alibi_slopes,
            side.sinks,
        ];
        let dense = side.bias.or_else(|| Some((u8::MAX, side.mask?)));
        let bits = lists.iter().fold(0, |bits, list| bits << 1 | u16::from(list.is_some()));
        Self {
            // None at all is something else than no side.
            lists: bits | 1 << 15,
            sequences: side.cu_seqlens_q.map_or(0, |cu| cu.len),
            longest: [side.max_seqlen_q, side.max_seqlen_kv].map(|longest| longest.unwrap_or(0)),
            table: side.page_table.map_or([0; 3], |table| [table.shape[0], table.shape[1], table.row_stride]),
            kv_dtype: side.kv_dtype.unwrap_or(u8::MAX),
            dense: dense.map(|(dtype, dense)| (dtype, dense.shape, dense.strides)),
            softcap: side.softcap.map_or(0, f64::to_bits),
            chunk: side.chunk.unwrap_or(0),
        }
    }
}

impl Call<'_> {
    /// How it is computed on a GPU, or a CPU; on a GPU also with what.
    fn planned(
        &self,
        gpu: Option<usize>,
        threads: usize,
    ) -> Result<(Attention, Option<DeviceTensors>), Error> {
        let problem = self.problem()?;
        let Some(ordinal) = gpu else {
            let options = Options { threads: (threads > 0).then_some(threads), ..Options::default() };
            return Ok((Attention::plan_with(problem, Device::Cpu, &options)?, None));
        };
        let tensors = self.on_device(&problem)?;
        let attention = gpu::shared(ordinal)?.plan(&problem, &tensors, &Options::default())?;
        Ok((attention, Some(tensors)))
    }
}

impl Known {
    /// # Safety
    /// As [`Call::run`]: the operands are Q, K and V, the addresses those of the outputs, all of the forms that are known.
    pub(crate) unsafe fn run(
        &self,
        [q, k, v]: [Operand; 3],
        side: Option<&Side>,
        [o, lse]: [usize; 2],
        stream: u64,
    ) -> Result<(), Error> {
        if let Some(mut tensors) = self.tensors {
            let places = [&mut tensors.q, &mut tensors.k, &mut tensors.v, &mut tensors.o];
            for (place, address) in places.into_iter().zip([q.address, k.address, v.address, o]) {
                place.address = address as u64;
            }
            if let Some(place) = &mut tensors.lse {
                place.address = lse as u64;
            }
            if let Some(side) = side {
                side.move_to(&mut tensors);
            }
            // SAFETY: by this function's contract.
            return Ok(unsafe { self.attention.run_on(RawStream(stream), &tensors) }?);
        }
        let (problem, o) = (self.attention.problem(), Operand { address: o, ..self.o });
        let (dtype, kv_dtype) = (problem.dtype(), problem.kv_dtype());
        let rows: usize = sizes("O", o.shape)?[..3].iter().product();
        // SAFETY: by contract each operand's elements are valid, and nobody else has the outputs.
        let (inputs, side, o, lse) = unsafe {
            (
                [q.view("Q", dtype)?, k.view("K", kv_dtype)?, v.view("V", kv_dtype)?],
                side.map_or(Ok(SideInputs::default()), |side| side.inputs(problem))?,
                o.view_mut("O", problem.output_dtype())?,
                (lse != 0).then(|| std::slice::from_raw_parts_mut(lse as *mut f32, rows)),
            )
        };
        Ok(self.attention.run_with(inputs, &side, o, lse)?)
    }
}

impl Side {
    /// Puts the addresses of these lists in the place of others of the same lengths.
    fn move_to(&self, tensors: &mut DeviceTensors) {
        let move_word = |to: &mut Option<u64>, list: Option<List>| {
            if let (Some(to), Some(list)) = (to, list) {
                *to = list.address as u64;
            }
        };
        let DeviceSide {
            queries,
            keys,
            seqused_q,
            seqused_kv,
            leftpad_kv,
            indices,
            pages,
            alibi_slopes,
            bias,
            mask,
            blocks: _,
            sinks,
        } = &mut tensors.side;
        for (tokens, cu) in [(queries, self.cu_seqlens_q), (keys, self.cu_seqlens_kv)] {
            if let (Some(tokens), Some(cu)) = (tokens, cu) {
                tokens.cu_seqlens = cu.address as u64;
            }
        }
        move_word(seqused_q, self.seqused_q);
        move_word(seqused_kv, self.seqused_kv);
        move_word(leftpad_kv, self.leftpad_kv);
        move_word(alibi_slopes, self.alibi_slopes);
        move_word(sinks, self.sinks);
        for (dense, operand) in [(bias, self.bias.map(|(_, bias)| bias)), (mask, self.mask)] {
            if let (Some(dense), Some(operand)) = (dense, operand) {
                dense.address = operand.address as u64;
            }
        }
        if let (Some(indices), Some(list)) = (indices, self.cache_batch_idx) {
            indices.address = list.address as u64;
        }
        if let (Some(pages), Some(table)) = (pages, self.page_table) {
            pages.table = table.address as u64;
        }
        if let (Some(scales), [_, Some(k), Some(v)]) = (&mut tensors.scales, self.scales) {
            (scales.k, scales.v) = (k.address as u64, v.address as u64);
        }
    }
}

// Scales are compared by their bits: one that is NaN is never ordinary, so never kept.
impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for (shape, strides) in &self.forms {
            state.write_i64(folded(shape, strides));
        }
        let Wanted { scale, visible, enable_gqa, flash_layout, out_by_token, one_query, with_lse, precision } =
            self.wanted;
        state.write_u64(scale.map_or(0, f64::to_bits));
        state.write_i64(visible.left);
        state.write_i64(visible.right);
        let flags = [
            visible.bottom_right,
            enable_gqa,
            flash_layout,
            out_by_token,
            one_query,
            with_lse,
            precision == Precision::High,
            self.batch_invariant,
        ];
        let flags = flags.into_iter().fold(0, |bits, flag| bits << 1 | u64::from(flag));
        state.write_u64(flags << 8 | u64::from(self.dtype));
        state.write_usize(self.threads << 8 | self.gpu.map_or(0xff, |gpu| gpu & 0x7f));
        let Beside { lists, sequences, longest, table, kv_dtype, dense, softcap, chunk } = self.beside;
        if lists == 0 {
            return;
        }
        state.write_u64(u64::from(lists) << 8 | u64::from(kv_dtype));
        state.write_usize(sequences);
        for number in longest.iter().chain(&table) {
            state.write_i64(*number);
        }
        if let Some((dtype, shape, strides)) = dense {
            state.write_i64(folded(&shape, &strides) ^ i64::from(dtype));
        }
        state.write_u64(softcap ^ chunk as u64);
    }
}

/// One number for a form, since the hasher waits for each of its numbers before the next: sizes and strides of tensors that lie in the same
/// memory differ in more than what falls together here.
fn folded(shape: &[i64; 4], strides: &[i64; 4]) -> i64 {
    shape.iter().chain(strides).fold(0, |folded: i64, number| folded.rotate_left(13) ^ number)
}

/// A few instructions a number: forms come from one program and mean no harm.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // An odd number whose bits look random: the fractional part of the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number as u64);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}
