//! One call, as Python describes it.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use evosdpa::{
    Alignment, Attention, CpuKernel, DType, Device, Kinds, Mask, Options, Precision, Problem, Shape,
    SideInputs, Sizes, TensorView, TensorViewMut,
};

use crate::{Error, Side};

/// Whether every call asks for batch-invariant results: of the process, since neither models nor servers hand such a word down to attention.
static BATCH_INVARIANT: LazyLock<AtomicBool> = LazyLock::new(|| {
    AtomicBool::new(std::env::var_os("EVOSDPA_BATCH_INVARIANT").is_some_and(|value| value == "1"))
});

/// Whether every call of this process from now on asks for batch-invariant results; says what was before.
pub fn set_batch_invariant(on: bool) -> bool {
    BATCH_INVARIANT.swap(on, Ordering::Relaxed)
}

thread_local! {
    /// Whether this thread's calls ask for them: what a single wrapper was planned with is not the process's.
    static BATCH_INVARIANT_HERE: Cell<bool> = const { Cell::new(false) };
}

/// Whether every call of this thread from now on asks for batch-invariant results; says what was before.
pub fn set_batch_invariant_here(on: bool) -> bool {
    BATCH_INVARIANT_HERE.replace(on)
}

/// Whether a call from here does.
pub(crate) fn is_batch_invariant() -> bool {
    BATCH_INVARIANT.load(Ordering::Relaxed) || BATCH_INVARIANT_HERE.get()
}

/// A tensor as Python describes it: the address of its first element, sizes and strides in elements, indexed
/// `[batch, heads, sequence, head dimension]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Address of the first element.
    pub address: usize,
    /// Sizes.
    pub shape: [i64; 4],
    /// Strides in elements.
    pub strides: [i64; 4],
}

/// Which keys a query sees: `left` before and `right` after its own position, -1 for no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Keys before.
    pub left: i64,
    /// Keys after.
    pub right: i64,
    /// Whether the last query is aligned with the last key (FlashAttention) or the first with the first (PyTorch).
    pub bottom_right: bool,
}

/// Where the tensors are, and what runs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this process's memory, to be computed on this many threads (0 for all).
    Cpu {
        /// The threads.
        threads: usize,
    },
    /// On a GPU, to be queued on the caller's stream and not waited for.
    Cuda {
        /// The GPU's number.
        ordinal: usize,
        /// The stream.
        stream: u64,
    },
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call<'a> {
    /// Element type of the tensors, where [`Side`] does not say another: 0 for f32, 1 for f16, 2 for bf16, 3 for e4m3, 4 for
    /// the codes u8, 5 for those of i8.
    pub dtype: u8,
    /// Queries.
    pub q: Operand,
    /// Keys.
    pub k: Operand,
    /// Values.
    pub v: Operand,
    /// Output.
    pub o: Operand,
    /// Address of f32 values for the log-sum-exp, `[batch, query heads, queries]` as O has them; 0 when it is not wanted.
    pub lse: usize,
    /// What scores are multiplied with; `None` for one over the root of the head dimension.
    pub scale: Option<f64>,
    /// The mask.
    pub visible: Visible,
    /// How exact the answer must be.
    pub precision: Precision,
    /// Lengths, pages, modifiers, scales; `None` for the plain problem.
    pub side: Option<&'a Side>,
}

impl Call<'_> {
    /// What is asked.
    pub fn problem(&self) -> Result<Problem, Error> {
        let (q, k) = (sizes("Q", self.q.shape)?, sizes("K", self.k.shape)?);
        let [.., dim_v] = sizes("V", self.v.shape)?;
        let (batch, seq_q, seq_kv) = match self.side {
            None => (None, q[2], k[2]),
            Some(side) => side.lengths(q, k)?,
        };
        let sizes = Sizes {
            batch: batch.unwrap_or(q[0]),
            heads_q: q[1],
            heads_kv: k[1],
            seq_q,
            seq_kv,
            dim_qk: q[3],
            dim_v,
        };
        let shape = Shape::new(sizes, self.visible.mask()?).map_err(evosdpa::Error::from)?;
        let kinds = match self.side {
            None => Kinds { precision: self.precision, ..Kinds::default() },
            Some(side) => side.kinds(self)?,
        };
        let kinds = Kinds { batch_invariant: is_batch_invariant(), ..kinds };
        let shape = shape.with_kinds(kinds).map_err(evosdpa::Error::from)?;
        let problem = Problem::new(shape, dtype(self.dtype)?).map_err(evosdpa::Error::from)?;
        let problem = problem.with_lse(self.lse != 0);
        match self.scale {
            None => Ok(problem),
            Some(scale) => Ok(problem.with_scale(scale as f32).map_err(evosdpa::Error::from)?),
        }
    }

    /// Checks lengths and pages in this process's memory against the tensors' shapes, wherever the tensors themselves are.
    ///
    /// # Safety
    /// The lists and the page table of [`Call::side`] must be valid to read.
    pub unsafe fn check_lists(&self) -> Result<(), Error> {
        let problem = self.problem()?;
        let Some(side) = self.side else { return Ok(()) };
        // SAFETY: by this function's contract.
        let lists = unsafe { side.lists(&problem) }?;
        let (q, k) = (sizes("Q", self.q.shape)?, sizes("K", self.k.shape)?);
        evosdpa_core::Sequences::new(&problem, &lists, q, k).map_err(evosdpa::Error::from)?;
        Ok(())
    }

    /// Refuses what the shapes alone say is wrong.
    pub fn check_shapes(&self) -> Result<(), Error> {
        let [q, k, v] = [sizes("Q", self.q.shape)?, sizes("K", self.k.shape)?, sizes("V", self.v.shape)?];
        Ok(self.problem()?.check_shapes(q, k, v).map_err(evosdpa::Error::from)?)
    }

    /// Refuses what [`Call::run`] would refuse on a CPU, before anything is done.
    ///
    /// # Safety
    /// As [`Call::run`] on a CPU, for the inputs.
    pub unsafe fn check(&self) -> Result<(), Error> {
        let problem = self.problem()?;
        self.check_shapes()?;
        // SAFETY: by this function's contract.
        unsafe {
            self.check_lists()?;
            self.q.view("Q", problem.dtype())?;
            self.k.view("K", problem.kv_dtype())?;
            self.v.view("V", problem.kv_dtype())?;
            self.side.map_or(Ok(SideInputs::default()), |side| side.inputs(&problem))?;
        }
        Ok(())
    }

    /// Computes attention where the tensors are. Every call from Python comes through here.
    ///
    /// # Safety
    /// Every element that an operand's shape and strides reach must be valid memory of its type and place: to read for Q, K
    /// and V, to write and read by nobody else for O and the log-sum-exp. On a CPU for the time of the call, on a GPU until
    /// the stream has come past it, and the stream must be as [`Attention::run_on`] asks.
    pub unsafe fn run(&self, place: Place) -> Result<(), Error> {
        let problem = self.problem()?;
        caught(|| match place {
            // SAFETY: by this function's contract.
            Place::Cpu { threads } => unsafe { self.run_on_cpu(problem, threads) },
            // SAFETY: by this function's contract.
            Place::Cuda { ordinal, stream } => unsafe { self.queue_on_gpu(problem, ordinal, stream) },
        })
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_on_cpu(&self, problem: Problem, threads: usize) -> Result<(), Error> {
        let kernel = self.side.is_some_and(|side| side.fast).then_some(CpuKernel::Flash);
        let options = Options { kernel, threads: (threads > 0).then_some(threads), ..Options::default() };
        let attention = Attention::plan_with(problem, Device::Cpu, &options)?;
        let (dtype, kv_dtype) = (problem.dtype(), problem.kv_dtype());
        let rows: usize = sizes("O", self.o.shape)?[..3].iter().product();
        // SAFETY: by contract each operand's elements are valid, and nobody else has the outputs.
        let (q, k, v, side, o, lse) = unsafe {
            (
                self.q.view("Q", dtype)?,
                self.k.view("K", kv_dtype)?,
                self.v.view("V", kv_dtype)?,
                self.side.map_or(Ok(SideInputs::default()), |side| side.inputs(&problem))?,
                self.o.view_mut("O", problem.output_dtype())?,
                (self.lse != 0).then(|| std::slice::from_raw_parts_mut(self.lse as *mut f32, rows)),
            )
        };
        Ok(attention.run_with([q, k, v], &side, o, lse)?)
    }
}

/// The element type that a code stands for.
pub(crate) fn dtype(code: u8) -> Result<DType, Error> {
    const CODES: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::U8, DType::I8];
    CODES.get(usize::from(code)).copied().ok_or(Error::DTypeCode { code })
}

impl Visible {
    fn mask(self) -> Result<Mask, Error> {
        let Self { left, right, bottom_right } = self;
        if left < -1 || right < -1 {
            return Err(Error::Window { left, right });
        }
        let alignment = if bottom_right { Alignment::BottomRight } else { Alignment::TopLeft };
        // -1 is the only number below zero left.
        let (left, right) = (usize::try_from(left).ok(), usize::try_from(right).ok());
        Ok(match (left, right) {
            (None, None) => Mask::Full,
            (None, Some(0)) => Mask::Causal(alignment),
            _ => Mask::Window { left, right, alignment },
        })
    }
}

impl Operand {
    /// # Safety
    /// The elements are valid to read for `'a`.
    pub(crate) unsafe fn view<'a>(
        &self,
        tensor: &'static str,
        dtype: DType,
    ) -> Result<TensorView<'a>, Error> {
        let (shape, strides, bytes) = self.extent(tensor, dtype)?;
        // SAFETY: by contract the elements are valid, and the bytes end with the last of them.
        let data = unsafe { std::slice::from_raw_parts(self.start(bytes), bytes) };
        Ok(TensorView::new(data, dtype, shape, strides).map_err(evosdpa::Error::from)?)
    }

    /// # Safety
    /// The elements are valid to write for `'a`, and nobody else reads or writes between the first and the last.
    pub(crate) unsafe fn view_mut<'a>(
        &self,
        tensor: &'static str,
        dtype: DType,
    ) -> Result<TensorViewMut<'a>, Error> {
        let (shape, strides, bytes) = self.extent(tensor, dtype)?;
        // SAFETY: by contract the elements are valid, and the bytes end with the last of them.
        let data = unsafe { std::slice::from_raw_parts_mut(self.start(bytes), bytes) };
        Ok(TensorViewMut::new(data, dtype, shape, strides).map_err(evosdpa::Error::from)?)
    }

    /// Where the bytes are. Tensors without elements need have no memory, but a slice must not be nowhere.
    fn start(&self, bytes: usize) -> *mut u8 {
        if bytes == 0 {
            std::ptr::NonNull::<u64>::dangling().as_ptr().cast()
        } else {
            self.address as *mut u8
        }
    }

    /// Shape, strides, and the bytes from the first element to the end of the last.
    pub(crate) fn extent(
        &self,
        tensor: &'static str,
        dtype: DType,
    ) -> Result<([usize; 4], [usize; 4], usize), Error> {
        let shape = sizes(tensor, self.shape)?;
        let empty = shape.contains(&0);
        if self.address == 0 && !empty {
            return Err(Error::NoMemory { tensor });
        }
        let mut strides = [0; 4];
        let mut last = 0usize;
        for i in 0..4 {
            // The stride of a dimension of size one is never used, and may be anything.
            strides[i] = match usize::try_from(self.strides[i]) {
                Ok(stride) => stride,
                Err(_) if shape[i] == 1 => 0,
                Err(_) => return Err(Error::NegativeStride { tensor, strides: self.strides }),
            };
            last = last.saturating_add(shape[i].saturating_sub(1).saturating_mul(strides[i]));
        }
        // A slice may not be longer; the view then says that the strides reach outside it.
        let most = isize::MAX as usize / dtype.bytes();
        let elements = if empty { 0 } else { last.saturating_add(1).min(most) };
        Ok((shape, strides, elements * dtype.bytes()))
    }
}

pub(crate) fn sizes(tensor: &'static str, shape: [i64; 4]) -> Result<[usize; 4], Error> {
    let mut sizes = [0; 4];
    for (size, given) in sizes.iter_mut().zip(shape) {
        *size = usize::try_from(given).map_err(|_| Error::NegativeSize { tensor, shape })?;
    }
    Ok(sizes)
}

/// A panic as an error: Python's `except Exception` does not catch what a panic becomes by itself.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let said = payload.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| payload.downcast_ref::<&str>().copied());
        Err(Error::Panic { problem: said.unwrap_or("a panic without words").to_owned() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(data: &[f32], shape: [i64; 4]) -> Operand {
        let strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1];
        Operand { address: data.as_ptr() as usize, shape, strides }
    }

    fn call(q: &[f32], o: &[f32], shape: [i64; 4]) -> Call<'static> {
        let (input, output) = (packed(q, shape), packed(o, shape));
        let visible = Visible { left: -1, right: -1, bottom_right: false };
        Call {
            dtype: 0,
            q: input,
            k: input,
            v: input,
            o: output,
            lse: 0,
            scale: None,
            visible,
            precision: Precision::Default,
            side: None,
        }
    }

    #[test]
    fn batch_invariance_is_asked_for_by_the_process_or_a_thread() {
        let q = [0.5f32; 8];
        let asked = || {
            let problem = call(&q, &q, [1, 1, 2, 4]).problem().unwrap();
            problem.features().contains(evosdpa::Feature::BatchInvariant)
        };
        let before = set_batch_invariant(true);
        assert!(asked());
        assert!(set_batch_invariant(false));
        assert!(!asked());
        assert!(!set_batch_invariant_here(true));
        assert!(asked());
        assert!(!std::thread::spawn(is_batch_invariant).join().unwrap());
        assert!(set_batch_invariant_here(false));
        assert!(!asked());
        set_batch_invariant(before);
    }

    #[test]
    fn a_mean_of_equal_rows_is_the_row() {
        let (q, o) = (vec![0.5f32; 2 * 3 * 4], vec![f32::NAN; 2 * 3 * 4]);
        // SAFETY: the operands describe these two vectors.
        unsafe { call(&q, &o, [1, 2, 3, 4]).run(Place::Cpu { threads: 0 }) }.unwrap();
        assert!(o.iter().all(|x| (x - 0.5).abs() < 1e-6), "{o:?}");
    }

    #[test]
    fn what_cannot_be_expressed_is_refused_with_its_values() {
        let (q, o) = (vec![0.5f32; 24], vec![0f32; 24]);
        let base = call(&q, &o, [1, 2, 3, 4]);
        let refused = |change: &dyn Fn(&mut Call<'_>)| {
            let mut call = base;
            change(&mut call);
            // SAFETY: refused before memory is touched.
            unsafe { call.run(Place::Cpu { threads: 1 }) }.unwrap_err().to_string()
        };
        assert!(refused(&|call| call.q.strides[2] = -4).contains("[24, 12, -4, 1]"));
        assert!(refused(&|call| call.q.shape[0] = -1).contains("[-1, 2, 3, 4]"));
        assert!(refused(&|call| call.k.address = 0).contains("K has no memory"));
        assert!(refused(&|call| call.dtype = 9).contains("code 9"));
        assert!(refused(&|call| call.visible.left = -2).contains("(-2, -1)"));
        assert!(refused(&|call| call.scale = Some(f64::NAN)).contains("finite"));
        assert!(refused(&|call| call.k.shape[1] = 3).contains("2 query heads"));
        assert!(refused(&|call| call.v.shape[2] = 2).contains("V has shape [1, 2, 2, 4]"));
        assert!(refused(&|call| call.q.strides[3] = 2).contains("stride 2"));
        assert!(refused(&|call| call.q.strides[1] = i64::MAX).contains("reaches element"));
        assert!(refused(&|call| call.o.strides[1] = 0).contains("overlaps itself"));
    }

    #[test]
    fn precision_is_the_problems() {
        let (q, o) = (vec![0.5f32; 24], vec![0f32; 24]);
        let base = call(&q, &o, [1, 2, 3, 4]);
        assert_eq!(base.problem().unwrap().precision(), Precision::Default);
        let high = Call { precision: Precision::High, ..base };
        assert_eq!(high.problem().unwrap().precision(), Precision::High);
    }

    #[test]
    fn windows_become_the_mask_they_are() {
        let mask = |left, right, bottom_right| Visible { left, right, bottom_right }.mask().unwrap();
        assert_eq!(mask(-1, -1, true), Mask::Full);
        assert_eq!(mask(-1, 0, false), Mask::Causal(Alignment::TopLeft));
        assert_eq!(mask(-1, 0, true), Mask::Causal(Alignment::BottomRight));
        let window = Mask::Window { left: Some(3), right: Some(0), alignment: Alignment::BottomRight };
        assert_eq!(mask(3, 0, true), window);
    }

    #[test]
    fn a_panic_becomes_an_error() {
        let error = caught::<()>(|| panic!("number {}", 7)).unwrap_err().to_string();
        assert!(error.contains("number 7"), "{error}");
    }
}
