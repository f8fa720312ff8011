//! New tokens for a cache and rotary embedding, as Python describes them.

use evosdpa::{Device, NewTokens, Placement, Positions, Rotary, cache};

use crate::{Error, List, Operand, Place, Table, call};

/// New keys and values for a cache.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    pub(crate) dtype: u8,
    pub(crate) caches: [Operand; 2],
    pub(crate) new: [Operand; 2],
    /// Tokens that each sequence holds: 32-bit integers.
    pub lengths: List,
    /// Where each sequence's new tokens begin among packed ones.
    pub cu_seqlens: Option<List>,
    /// Which pages are a sequence's.
    pub page_table: Option<Table>,
    /// Which block of the cache, or row of the page table, is a sequence's.
    pub cache_batch_idx: Option<List>,
    /// How keys are turned.
    pub rotary: Option<Angles>,
    /// The position of each sequence's first new key, where it is not the one in the cache.
    pub rotary_first: Option<List>,
}

/// The angles of rotary embedding: cosines and sines with the codes of their types.
#[derive(Clone, Copy, Debug)]
pub struct Angles {
    /// `[1, 1, positions, columns]`.
    pub cos: (u8, Operand),
    /// The same.
    pub sin: (u8, Operand),
    /// Whether pairs are neighbours.
    pub interleaved: bool,
}

/// A tensor to be turned.
#[derive(Clone, Copy, Debug)]
pub struct Rotate {
    /// The code of its type.
    pub dtype: u8,
    /// The tensor.
    pub x: Operand,
    /// Where it goes.
    pub out: Operand,
    /// The angles.
    pub rotary: Angles,
    /// The position of each sequence's first token.
    pub first: List,
    /// Where each sequence begins among packed tokens.
    pub cu_seqlens: Option<List>,
    /// Whether positions go up.
    pub advance: bool,
}

impl Append {
    /// Of keys and values, in this order.
    pub fn new(dtype: u8, caches: [Operand; 2], new: [Operand; 2]) -> Self {
        let lengths = List { address: 0, len: 0 };
        let (page_table, rotary) = (None, None);
        let (cu_seqlens, cache_batch_idx, rotary_first) = (None, None, None);
        Self { dtype, caches, new, lengths, cu_seqlens, page_table, cache_batch_idx, rotary, rotary_first }
    }

    /// Writes them, or refuses before anything is written. On a GPU it is queued; what lengths and pages hold is not known then.
    ///
    /// # Safety
    /// Every element that an operand's shape and strides reach must be valid memory of its type and place, the caches' to write
    /// and nobody else's: on a CPU for the time of the call, on a GPU until the stream has come past it.
    pub unsafe fn run(&self, place: Place) -> Result<(), Error> {
        let shapes = self.shapes()?;
        call::caught(|| match place {
            // SAFETY: by this function's contract.
            Place::Cpu { .. } => unsafe { self.run_on_cpu(shapes) },
            // SAFETY: as above.
            Place::Cuda { ordinal, stream } => unsafe { self.queue_on_gpu(shapes, ordinal, stream) },
        })
    }

    /// Checks lists in this process's memory against tensors that may be elsewhere.
    ///
    /// # Safety
    /// The lists must be valid to read.
    pub unsafe fn check_lists(&self) -> Result<(), Error> {
        let shapes = self.shapes()?;
        // SAFETY: by this function's contract.
        let (tokens, first) = unsafe { (self.tokens()?, self.first()?) };
        let [k, v] = [call::sizes("k", self.new[0].shape)?, call::sizes("v", self.new[1].shape)?];
        let placement = Placement::new(&tokens, shapes[0], k).map_err(evosdpa::Error::from)?;
        placement.check(shapes[1], v).map_err(evosdpa::Error::from)?;
        if let Some(angles) = &self.rotary {
            let positions = call::sizes("rotary_cos", angles.cos.1.shape)?[2];
            placement.check_positions(first, positions).map_err(evosdpa::Error::from)?;
        }
        Ok(())
    }

    /// The caches' shapes. New tokens must not lie in a cache.
    fn shapes(&self) -> Result<[[usize; 4]; 2], Error> {
        let dtype = call::dtype(self.dtype)?;
        let mut shapes = [[0; 4]; 2];
        for (i, name) in ["k_cache", "v_cache"].into_iter().enumerate() {
            let (shape, _, bytes) = self.caches[i].extent(name, dtype)?;
            shapes[i] = shape;
            for (new, new_name) in self.new.iter().zip(["k", "v"]) {
                let (_, _, new_bytes) = new.extent(new_name, dtype)?;
                let (cache, new) = (self.caches[i].address, new.address);
                if bytes > 0 && new_bytes > 0 && cache < new + new_bytes && new < cache + bytes {
                    return Err(Error::NewInCache { new: new_name, cache: name });
                }
            }
        }
        // One memory for both, as latent attention has it, holds what is the same for both.
        let [caches, new] = [&self.caches, &self.new].map(|pair| pair[0].address == pair[1].address);
        if caches && (!new || self.rotary.is_some()) && shapes.iter().all(|shape| !shape.contains(&0)) {
            return Err(Error::OneCache);
        }
        Ok(shapes)
    }

    /// # Safety
    /// The lists must be valid to read for `'a`.
    unsafe fn tokens<'a>(&self) -> Result<NewTokens<'a>, Error> {
        // SAFETY: by contract.
        unsafe {
            Ok(NewTokens {
                lengths: self.lengths.read("cache_seqlens")?,
                cu_seqlens: integers("cu_seqlens_k_new", self.cu_seqlens)?,
                pages: self.page_table.map(|table| table.entries()).transpose()?,
                cache_batch_idx: integers("cache_batch_idx", self.cache_batch_idx)?,
            })
        }
    }

    /// # Safety
    /// As [`Self::tokens`].
    unsafe fn first<'a>(&self) -> Result<Option<&'a [i32]>, Error> {
        // SAFETY: by contract.
        unsafe { integers("rotary_seqlens", self.rotary_first) }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_on_cpu(&self, shapes: [[usize; 4]; 2]) -> Result<(), Error> {
        let (device, dtype) = (Device::Cpu, call::dtype(self.dtype)?);
        // SAFETY: by contract; the caches' views do not live at the same time, since one may lie between the other's rows.
        unsafe {
            let (tokens, first) = (self.tokens()?, self.first()?);
            let (k, v) = (self.new[0].view("k", dtype)?, self.new[1].view("v", dtype)?);
            let rotary = self.rotary.map(|angles| angles.views()).transpose()?.map(|angles| (angles, first));
            let placement = Placement::new(&tokens, shapes[0], k.shape()).map_err(evosdpa::Error::from)?;
            cache::check(shapes[1], dtype, v, &placement, None)?;
            // Strides that a view refuses.
            self.caches[1].view_mut("v_cache", dtype).map(|_| ())?;
            let mut k_cache = self.caches[0].view_mut("k_cache", dtype)?;
            cache::append_tensor(device, &mut k_cache, k, &placement, rotary)?;
            let mut v_cache = self.caches[1].view_mut("v_cache", dtype)?;
            Ok(cache::append_tensor(device, &mut v_cache, v, &placement, None)?)
        }
    }
}

impl Rotate {
    /// Turns the tensor, or refuses before anything is written.
    ///
    /// # Safety
    /// As [`Append::run`], for the output.
    pub unsafe fn run(&self, place: Place) -> Result<(), Error> {
        call::caught(|| match place {
            // SAFETY: by this function's contract.
            Place::Cpu { .. } => unsafe { self.run_on_cpu() },
            // SAFETY: as above.
            Place::Cuda { ordinal, stream } => unsafe { self.queue_on_gpu(ordinal, stream) },
        })
    }

    /// Checks lists in this process's memory against tensors that may be elsewhere.
    ///
    /// # Safety
    /// The lists must be valid to read.
    pub unsafe fn check_lists(&self) -> Result<(), Error> {
        let shape = call::sizes("q", self.x.shape)?;
        let positions = call::sizes("rotary_cos", self.rotary.cos.1.shape)?[2];
        // SAFETY: by this function's contract.
        let given = unsafe { self.positions()? };
        Ok(given.check(shape, positions).map_err(evosdpa::Error::from)?)
    }

    /// # Safety
    /// The lists must be valid to read for `'a`.
    unsafe fn positions<'a>(&self) -> Result<Positions<'a>, Error> {
        // SAFETY: by contract.
        unsafe {
            let cu_seqlens = integers("cu_seqlens_q", self.cu_seqlens)?;
            Ok(Positions { first: self.first.read("rotary positions")?, cu_seqlens, advance: self.advance })
        }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_on_cpu(&self) -> Result<(), Error> {
        let dtype = call::dtype(self.dtype)?;
        // SAFETY: by contract.
        unsafe {
            let positions = self.positions()?;
            let (x, out) = (self.x.view("q", dtype)?, self.out.view_mut("q", dtype)?);
            Ok(cache::rotate(Device::Cpu, x, out, self.rotary.views()?, positions)?)
        }
    }
}

impl Angles {
    /// # Safety
    /// The elements are valid to read for `'a`.
    unsafe fn views<'a>(&self) -> Result<Rotary<'a>, Error> {
        // SAFETY: by contract.
        unsafe {
            Ok(Rotary {
                cos: self.cos.1.view("rotary_cos", call::dtype(self.cos.0)?)?,
                sin: self.sin.1.view("rotary_sin", call::dtype(self.sin.0)?)?,
                interleaved: self.interleaved,
            })
        }
    }
}

/// # Safety
/// The list must be valid to read for `'a`.
unsafe fn integers<'a>(name: &'static str, list: Option<List>) -> Result<Option<&'a [i32]>, Error> {
    // SAFETY: by contract.
    list.map(|list| unsafe { list.read::<i32>(name) }).transpose()
}
