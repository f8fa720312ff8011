//! Writes to caches on the CPU, the simulator and a GPU: three machines, the same bytes.
//!
//! `cache_write` answers no attention problem, so that its questions are of a kind of their own. Angles and tokens are drawn; turning rounds
//! in fp32 in an order that is written down, so that nothing is left open and all bytes must be the same, those that nobody writes included.

use evosdpa::{
    DType, DeviceTensor, Layout, NewTokens, PageTable, Positions, Rotary, Tensor, cache,
    gpu::{CacheWrite, DeviceNewTokens, DeviceQueries, DeviceRotary, DeviceTable},
};
use evosdpa_cuda::{Builder, GuardedBuffer};
use evosdpa_kernels::{Arch, cache::variant};
use evosdpa_oracle::{elements, rng::mix};
use ptxsan::{Arg, Buffer, Launch, Module, Options, Outcome, Schedule};
use serde::{Deserialize, Serialize};

use crate::{Error, device::Cuda};

/// What is asked of one launch.
#[derive(Clone, Debug)]
pub struct Write {
    /// The type of tokens, queries and caches.
    pub dtype: DType,
    /// Heads, of keys and of queries.
    pub heads: [usize; 2],
    /// Head dimensions of keys and of values.
    pub dims: [usize; 2],
    /// Blocks or pages, and tokens of each.
    pub cache: [usize; 2],
    /// Tokens that each sequence holds.
    pub lengths: Vec<i32>,
    /// New tokens of each sequence, or packed in all.
    pub tokens: usize,
    /// Where packed ones begin.
    pub cu_new: Option<Vec<i32>>,
    /// Entries, and how many a row has.
    pub table: Option<(Vec<i32>, usize)>,
    /// Blocks or rows of the table, by sequence.
    pub index: Option<Vec<i32>>,
    /// Whether keys and queries are turned, and how.
    pub rotary: Option<Turn>,
    /// Queries of each sequence, or packed in all.
    pub queries: usize,
    /// Where packed ones begin.
    pub cu_q: Option<Vec<i32>>,
    /// Elements between rows, so that nothing is aligned.
    pub gap: usize,
}

/// How keys and queries are turned.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The type of cosines and sines.
    pub angles: DType,
    /// Pairs of each row that are turned.
    pub columns: usize,
    /// Positions that have angles.
    pub positions: usize,
    /// Neighbours are pairs, not halves.
    pub interleaved: bool,
    /// The position of each sequence's first token; `None`: its length.
    pub first: Option<Vec<i32>>,
    /// Whether queries go on from there.
    pub advance: bool,
    /// Sines for cosines: a mistake that must show.
    pub swapped: bool,
}

/// A usual turn.
pub const TURN: Turn = Turn {
    angles: DType::F32,
    columns: 4,
    positions: 40,
    interleaved: false,
    first: None,
    advance: true,
    swapped: false,
};

/// Two sequences that hold 3 and 0 of 8 tokens and get two more.
pub fn contiguous(dtype: DType) -> Write {
    Write {
        dtype,
        heads: [2, 4],
        dims: [16, 16],
        cache: [2, 8],
        lengths: vec![3, 0],
        tokens: 2,
        cu_new: None,
        table: None,
        index: None,
        rotary: None,
        queries: 2,
        cu_q: None,
        gap: 0,
    }
}

/// The same in pages of 4, in no order.
pub fn paged(dtype: DType) -> Write {
    Write { cache: [6, 4], table: Some((vec![5, 2, 0, 3], 2)), ..contiguous(dtype) }
}

/// Every question, with a name.
pub fn questions() -> Vec<(&'static str, Write)> {
    let mut all = Vec::new();
    // All codes are bytes to it: those of e4m3 ask for the others.
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::E4M3] {
        all.push(("contiguous", contiguous(dtype)));
        all.push(("no row is aligned", Write { gap: 3, dims: [16, 7], ..contiguous(dtype) }));
        all.push(("pages", paged(dtype)));
    }
    let dtype = DType::BF16;
    all.push(("blocks by index", Write { index: Some(vec![4, 1]), cache: [5, 8], ..contiguous(dtype) }));
    all.push(("rows of the table by index", Write { index: Some(vec![1, 0]), ..paged(dtype) }));
    let one = Write { cache: [9, 1], table: Some((vec![5, 2, 0, 3, 8, 1, 4, 7], 4)), ..paged(dtype) };
    all.push(("pages of one", Write { lengths: vec![2, 0], ..one }));
    let lengths = vec![3, 0, 5, 8, 1];
    let packed = Write { cache: [5, 16], lengths, tokens: 9, ..contiguous(dtype) };
    // One sequence gets nothing, and two tokens at the end belong to none.
    all.push(("packed", Write { cu_new: Some(vec![0, 2, 2, 6, 6, 7]), ..packed }));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (interleaved, names) in [
            (false, ["turned halves", "whole rows of halves"]),
            (true, ["turned neighbours", "whole rows of neighbours"]),
        ] {
            let turn = Turn { interleaved, ..TURN };
            all.push((names[0], Write { rotary: Some(turn.clone()), ..contiguous(dtype) }));
            let whole = Turn { columns: 8, angles: dtype, ..turn };
            all.push((names[1], Write { rotary: Some(whole), gap: 1, ..paged(dtype) }));
        }
    }
    let elsewhere = Turn { first: Some(vec![30, 7]), advance: false, columns: 3, ..TURN };
    all.push(("other positions", Write { rotary: Some(elsewhere), ..contiguous(dtype) }));
    let packed = Write { queries: 6, cu_q: Some(vec![1, 4, 5]), rotary: Some(TURN), ..paged(dtype) };
    all.push(("packed queries", packed));
    all
}

/// What a launch leaves behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The caches of keys and of values.
    pub caches: [Vec<u8>; 2],
    /// The turned queries.
    pub q: Vec<u8>,
    /// Tokens that each sequence holds now.
    pub filled: Vec<i32>,
}

impl Written {
    fn bytes(&self) -> Vec<u8> {
        [&self.caches[0], &self.caches[1], &self.q, bytemuck::cast_slice(&self.filled)].concat()
    }

    /// Of all its bytes.
    pub fn digest(&self) -> String {
        blake3::hash(&self.bytes()).to_hex()[..32].to_owned()
    }
}

/// A write, on three machines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WriteRow {
    /// The kernel.
    pub kernel: String,
    /// The question's name.
    pub name: String,
    /// The type of the caches.
    pub dtype: DType,
    /// What the launch leaves behind.
    pub bytes: usize,
    /// Those that are the same on the simulator and the GPU, and on the CPU and the GPU.
    pub same_bytes: usize,
    /// See `same_bytes`.
    pub same_bytes_as_cpu: usize,
    /// Of the GPU's bytes.
    pub gpu_blake3: String,
    /// All three are the same.
    pub agrees: bool,
}

/// A question on three machines.
pub fn compare(gpu: &Cuda, kernels: &Kernels, name: &str, write: &Write) -> Result<WriteRow, Error> {
    let (simulated, outcome) = kernels.simulate(write, Schedule::RoundRobin)?;
    if !outcome.is_clean() {
        let findings = outcome.failures().map(ToString::to_string).collect();
        return Err(Error::Findings { kernel: KERNEL.to_owned(), findings });
    }
    let real = write.run(&mut OnGpu { gpu, buffers: Vec::new() })?;
    let (a, b, c) = (simulated.bytes(), real.bytes(), write.expected()?.bytes());
    let same = |x: &[u8]| x.iter().zip(&b).filter(|(x, y)| x == y).count();
    Ok(WriteRow {
        kernel: KERNEL.to_owned(),
        name: name.to_owned(),
        dtype: write.dtype,
        bytes: b.len(),
        same_bytes: same(&a),
        same_bytes_as_cpu: same(&c),
        gpu_blake3: real.digest(),
        agrees: a == b && b == c,
    })
}

const KERNEL: &str = "cache_write";

struct Tensors {
    new: [Tensor; 2],
    caches: [Tensor; 2],
    q: Tensor,
    q_out: Tensor,
    angles: [Tensor; 2],
}

/// Values that say where they come from.
fn drawn(shape: [usize; 4], dtype: DType, gap: usize, salt: u32) -> Tensor {
    let mut tensor = Tensor::poisoned_gaps(shape, dtype, Layout::Bshd, gap);
    elements::fill(&mut tensor, |at| {
        let hash = at.iter().fold(mix(u64::from(salt)), |hash, index| mix(hash ^ *index as u64));
        f64::from((hash >> 40) as u32) / f64::from(1 << 23) - 1.0
    });
    tensor
}

impl Write {
    fn batch(&self) -> usize {
        self.lengths.len()
    }

    fn tensors(&self) -> Tensors {
        let [heads, heads_q] = self.heads;
        let block = |packed: bool| if packed { 1 } else { self.batch() };
        let new = [0, 1].map(|i| {
            let shape = [block(self.cu_new.is_some()), heads, self.tokens, self.dims[i]];
            drawn(shape, self.dtype, self.gap, i as u32)
        });
        let caches = [0, 1].map(|i| {
            drawn([self.cache[0], heads, self.cache[1], self.dims[i]], self.dtype, self.gap, 8 + i as u32)
        });
        let shape = [block(self.cu_q.is_some()), heads_q, self.queries, self.dims[0]];
        let turn = self.rotary.clone().unwrap_or(TURN);
        let angles =
            [20, 21].map(|salt| drawn([1, 1, turn.positions, turn.columns], turn.angles, self.gap, salt));
        let (q, q_out) = (drawn(shape, self.dtype, self.gap, 30), drawn(shape, self.dtype, self.gap, 31));
        Tensors { new, caches, q, q_out, angles }
    }

    /// What the CPU makes of it.
    pub fn expected(&self) -> Result<Written, Error> {
        let Tensors { new, mut caches, q, mut q_out, angles } = self.tensors();
        let tokens = NewTokens {
            lengths: &self.lengths,
            cu_seqlens: self.cu_new.as_deref(),
            pages: self
                .table
                .as_ref()
                .map(|(entries, columns)| (PageTable { entries, row_stride: *columns }, *columns)),
            cache_batch_idx: self.index.as_deref(),
        };
        let rotary = self.rotary.as_ref().map(|turn| {
            let (cos, sin) = if turn.swapped { (1, 0) } else { (0, 1) };
            let (cos, sin) = (angles[cos].view(), angles[sin].view());
            Rotary { cos, sin, interleaved: turn.interleaved }
        });
        let first = self.rotary.as_ref().and_then(|turn| turn.first.as_deref());
        let [k_cache, v_cache] = &mut caches;
        let views = [k_cache.view_mut(), v_cache.view_mut()];
        let turned = rotary.map(|rotary| (rotary, first));
        cache::append(evosdpa::Device::Cpu, views, [new[0].view(), new[1].view()], &tokens, turned)?;
        if let (Some(rotary), Some(turn)) = (rotary, &self.rotary) {
            // Tokens of no sequence stay as they are.
            q_out = q.clone();
            let first = first.unwrap_or(&self.lengths);
            let positions = Positions { first, cu_seqlens: self.cu_q.as_deref(), advance: turn.advance };
            cache::rotate(evosdpa::Device::Cpu, q.view(), q_out.view_mut(), rotary, positions)?;
            // Gaps belong to no token.
            let poison = drawn(q.view().shape(), self.dtype, self.gap, 31);
            if self.gap > 0 {
                keep_gaps(&mut q_out, &poison, self.dims[0], self.gap);
            }
        }
        let added =
            |b: usize| self.cu_new.as_ref().map_or(self.tokens as i32, |cu: &Vec<i32>| cu[b + 1] - cu[b]);
        let filled = (0..self.batch()).map(|b| self.lengths[b] + added(b)).collect();
        Ok(Written { caches: caches.map(|cache| cache.bytes().to_vec()), q: q_out.bytes().to_vec(), filled })
    }

    /// The caches before anything is written.
    pub fn caches(&self) -> [Vec<u8>; 2] {
        self.tensors().caches.map(|cache| cache.bytes().to_vec())
    }

    fn run(&self, machine: &mut impl Machine) -> Result<Written, Error> {
        let tensors = self.tensors();
        let list = |values: &[i32]| bytemuck::cast_slice::<i32, u8>(values).to_vec();
        let mut read = |name: &str, bytes: &[u8]| machine.upload(name, bytes, true);
        let mut maybe = |name: &str, values: Option<&Vec<i32>>| {
            values.map(|values| read(name, &list(values))).transpose()
        };
        let cu_new = maybe("cu_new", self.cu_new.as_ref())?;
        let cu_q = maybe("cu_q", self.cu_q.as_ref())?;
        let index = maybe("index", self.index.as_ref())?;
        let first = maybe("first", self.rotary.as_ref().and_then(|turn| turn.first.as_ref()))?;
        let lengths = read("lengths", &list(&self.lengths))?;
        let table = match &self.table {
            None => None,
            Some((entries, columns)) => Some(DeviceTable {
                address: read("table", &list(entries))?,
                row_stride: *columns as i64,
                rows: entries.len() / columns,
                columns: *columns,
            }),
        };
        let mut placed = |name: &str, tensor: &Tensor| {
            let [block, head, token, _] = tensor.view().strides().map(|stride| stride as i64);
            Ok::<_, Error>(DeviceTensor {
                address: read(name, tensor.bytes())?,
                strides: [block, head, token],
            })
        };
        let new = [placed("k", &tensors.new[0])?, placed("v", &tensors.new[1])?];
        let q = placed("q", &tensors.q)?;
        let [cos, sin] = [placed("cos", &tensors.angles[0])?, placed("sin", &tensors.angles[1])?]
            .map(|angles| (angles.address, angles.strides[2]));
        let mut written = |name: &str, bytes: &[u8]| machine.upload(name, bytes, false);
        let caches =
            [written("k_cache", tensors.caches[0].bytes())?, written("v_cache", tensors.caches[1].bytes())?];
        let q_out = written("q_out", tensors.q_out.bytes())?;
        let filled = written("filled", &vec![0xFF; 4 * self.batch()])?;
        let at = |tensor: &Tensor, address: u64| {
            let [block, head, token, _] = tensor.view().strides().map(|stride| stride as i64);
            DeviceTensor { address, strides: [block, head, token] }
        };
        let is_swapped = self.rotary.as_ref().is_some_and(|turn| turn.swapped);
        machine.launch(&CacheWrite {
            first,
            tokens: Some(DeviceNewTokens {
                new,
                caches: [at(&tensors.caches[0], caches[0]), at(&tensors.caches[1], caches[1])],
                heads: self.heads[0],
                dims: self.dims,
                tokens: self.tokens,
                cu_seqlens: cu_new,
                blocks: self.cache[0],
                room: self.cache[1],
                table,
                cache_batch_idx: index,
                filled: Some(filled),
            }),
            queries: self.rotary.as_ref().map(|turn| DeviceQueries {
                q,
                out: at(&tensors.q_out, q_out),
                heads: self.heads[1],
                dim: self.dims[0],
                tokens: self.queries,
                cu_seqlens: cu_q,
                advance: turn.advance,
            }),
            rotary: self.rotary.as_ref().map(|turn| DeviceRotary {
                dtype: turn.angles,
                cos: if is_swapped { sin } else { cos },
                sin: if is_swapped { cos } else { sin },
                positions: turn.positions,
                columns: turn.columns,
                interleaved: turn.interleaved,
            }),
            ..CacheWrite::new(self.dtype, self.batch(), lengths)
        })?;
        let filled = machine.download(filled)?;
        Ok(Written {
            caches: [machine.download(caches[0])?, machine.download(caches[1])?],
            q: machine.download(q_out)?,
            filled: filled.as_chunks().0.iter().map(|four| i32::from_le_bytes(*four)).collect(),
        })
    }
}

fn keep_gaps(tensor: &mut Tensor, from: &Tensor, dim: usize, gap: usize) {
    let bytes = from.view().dtype().bytes();
    let row = (dim + gap) * bytes;
    for (at, rows) in from.bytes().chunks(row).enumerate() {
        let tail = at * row + dim * bytes..at * row + rows.len();
        tensor.bytes_mut()[tail].copy_from_slice(&rows[dim * bytes..]);
    }
}

/// Where a write is made.
trait Machine {
    fn upload(&mut self, name: &str, bytes: &[u8], is_read_only: bool) -> Result<u64, Error>;
    fn launch(&mut self, write: &CacheWrite) -> Result<(), Error>;
    fn download(&mut self, address: u64) -> Result<Vec<u8>, Error>;
}

/// The kernel of each type as the simulator runs it, compiled once.
pub struct Kernels(Vec<(DType, Module)>);

impl Kernels {
    /// Compiles them.
    pub fn compile() -> Result<Self, Error> {
        let builder = Builder::new()?;
        let module = |dtype: DType| {
            let artifact = builder.ptx(&variant(Arch::Sm90a, dtype))?;
            Ok((dtype, Module::parse(artifact.ptx())?))
        };
        [DType::F32, DType::F16, DType::BF16, DType::E4M3]
            .into_iter()
            .map(module)
            .collect::<Result<_, Error>>()
            .map(Self)
    }

    /// What the simulator makes of a write, and what it saw.
    pub fn simulate(&self, write: &Write, schedule: Schedule) -> Result<(Written, Outcome), Error> {
        let known = self.0.iter().find(|(dtype, _)| *dtype == write.dtype);
        let (_, module) = known.ok_or_else(|| {
            Error::MachineFault(format!("no cache_write of {} is compiled", write.dtype.name()))
        })?;
        let mut machine =
            Simulated { device: ptxsan::Device::new(), module, schedule, buffers: Vec::new(), outcome: None };
        let written = write.run(&mut machine)?;
        let none = || Error::MachineFault("nothing was launched".to_owned());
        Ok((written, machine.outcome.ok_or_else(none)?))
    }
}

struct Simulated<'a> {
    device: ptxsan::Device,
    module: &'a Module,
    schedule: Schedule,
    buffers: Vec<Buffer>,
    outcome: Option<Outcome>,
}

impl Machine for Simulated<'_> {
    fn upload(&mut self, name: &str, bytes: &[u8], is_read_only: bool) -> Result<u64, Error> {
        let buffer = self.device.upload(name, bytes)?;
        self.device.set_read_only(buffer, is_read_only)?;
        self.buffers.push(buffer);
        Ok(buffer.address())
    }

    fn launch(&mut self, write: &CacheWrite) -> Result<(), Error> {
        let params = write.params()?;
        let grid = [params.blocks_needed().unwrap_or(0), 1, 1];
        let args = vec![Arg::Bytes(bytemuck::bytes_of(&params).to_vec())];
        let mut launch = Launch::new(KERNEL, grid, [128, 1, 1], 0, args);
        launch.options = Options { schedule: self.schedule, ..Options::default() };
        let id = self.device.load(self.module)?;
        self.outcome = Some(self.device.launch(id, &launch)?);
        Ok(())
    }

    fn download(&mut self, address: u64) -> Result<Vec<u8>, Error> {
        match self.buffers.iter().find(|buffer| buffer.address() == address) {
            Some(buffer) => Ok(self.device.read(*buffer)?),
            None => Ok(Vec::new()),
        }
    }
}

struct OnGpu<'a> {
    gpu: &'a Cuda,
    buffers: Vec<GuardedBuffer>,
}

impl Machine for OnGpu<'_> {
    fn upload(&mut self, name: &str, bytes: &[u8], _is_read_only: bool) -> Result<u64, Error> {
        let mut buffer = GuardedBuffer::new(self.gpu.handle(), name, bytes.len())?;
        buffer.copy_from(bytes)?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    fn launch(&mut self, write: &CacheWrite) -> Result<(), Error> {
        // SAFETY: all addresses are those of buffers that live as long as `self` and have the sizes that the tensors have.
        unsafe { self.gpu.write_cache(write) }
    }

    fn download(&mut self, address: u64) -> Result<Vec<u8>, Error> {
        let Some(buffer) = self.buffers.iter().find(|buffer| buffer.address() == address) else {
            return Ok(Vec::new());
        };
        buffer.check()?;
        let mut bytes = vec![0; buffer.bytes()];
        buffer.copy_to(&mut bytes)?;
        Ok(bytes)
    }
}
