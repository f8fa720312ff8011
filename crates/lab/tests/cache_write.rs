//! The kernel that writes to caches, on the simulator: every byte held against the CPU's, every access watched, under two schedules.

use evosdpa::{
    DType, Device, DeviceTensor, Layout, NewTokens, PageTable, Positions, Rotary, Tensor, cache,
    gpu::{CacheWrite, DeviceNewTokens, DeviceQueries, DeviceRotary, DeviceTable},
};
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Arch, cache::variant};
use ptxsan::{Arg, Buffer, Launch, Module, Options, Outcome, Schedule};

/// What is asked of one launch.
#[derive(Clone)]
struct Write {
    dtype: DType,
    /// Heads, of keys and of queries.
    heads: [usize; 2],
    /// Head dimensions of keys and of values.
    dims: [usize; 2],
    /// Blocks or pages, and tokens of each.
    cache: [usize; 2],
    lengths: Vec<i32>,
    /// New tokens of each sequence, or packed in all.
    tokens: usize,
    cu_new: Option<Vec<i32>>,
    /// Entries, and how many a row has.
    table: Option<(Vec<i32>, usize)>,
    index: Option<Vec<i32>>,
    rotary: Option<Turn>,
    /// Queries of each sequence, or packed in all.
    queries: usize,
    cu_q: Option<Vec<i32>>,
    /// Elements between rows, so that nothing is aligned.
    gap: usize,
}

#[derive(Clone)]
struct Turn {
    angles: DType,
    columns: usize,
    positions: usize,
    interleaved: bool,
    first: Option<Vec<i32>>,
    advance: bool,
    swapped: bool,
}

const TURN: Turn = Turn {
    angles: DType::F32,
    columns: 4,
    positions: 40,
    interleaved: false,
    first: None,
    advance: true,
    swapped: false,
};

/// Two sequences that hold 3 and 0 of 8 tokens and get two more.
fn contiguous(dtype: DType) -> Write {
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
fn paged(dtype: DType) -> Write {
    Write { cache: [6, 4], table: Some((vec![5, 2, 0, 3], 2)), ..contiguous(dtype) }
}

/// What a launch leaves behind.
#[derive(PartialEq)]
struct Result {
    caches: [Vec<u8>; 2],
    q: Vec<u8>,
    filled: Vec<i32>,
}

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
    let mut state = salt.wrapping_mul(0x9e37_79b9) | 1;
    let mut view = tensor.view_mut();
    let (strides, bytes) = (view.strides(), dtype.bytes());
    for i in 0..shape.iter().product::<usize>() {
        let at = [i / (shape[1] * shape[2] * shape[3]), i / (shape[2] * shape[3]) % shape[1]];
        let (row, column) = (i / shape[3] % shape[2], i % shape[3]);
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
        let place = (at[0] * strides[0] + at[1] * strides[1] + row * strides[2] + column) * bytes;
        let place = &mut view.bytes_mut()[place..place + bytes];
        match dtype {
            DType::F32 => place.copy_from_slice(&value.to_le_bytes()),
            DType::F16 => place.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            DType::BF16 => place.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
            _ => place[0] = (state >> 16) as u8,
        }
    }
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
    fn expected(&self) -> Result {
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
        cache::append(Device::Cpu, views, [new[0].view(), new[1].view()], &tokens, turned).unwrap();
        if let (Some(rotary), Some(turn)) = (rotary, &self.rotary) {
            // Tokens of no sequence stay as they are.
            q_out = q.clone();
            let first = first.unwrap_or(&self.lengths);
            let positions = Positions { first, cu_seqlens: self.cu_q.as_deref(), advance: turn.advance };
            cache::rotate(Device::Cpu, q.view(), q_out.view_mut(), rotary, positions).unwrap();
            // Gaps are nobody's.
            let poison = drawn(q.view().shape(), self.dtype, self.gap, 31);
            if self.gap > 0 {
                keep_gaps(&mut q_out, &poison, self.dims[0], self.gap);
            }
        }
        let added =
            |b: usize| self.cu_new.as_ref().map_or(self.tokens as i32, |cu: &Vec<i32>| cu[b + 1] - cu[b]);
        let filled = (0..self.batch()).map(|b| self.lengths[b] + added(b)).collect();
        Result { caches: caches.map(|cache| cache.bytes().to_vec()), q: q_out.bytes().to_vec(), filled }
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

/// The kernel of each type, compiled once.
struct Kernels(Vec<(DType, Module)>);

impl Kernels {
    fn compile() -> Self {
        let module = |dtype: DType| {
            let ptx = Builder::default().ptx(&variant(Arch::Sm90a, dtype)).unwrap();
            (dtype, Module::parse(std::str::from_utf8(&ptx.code).unwrap().trim_end_matches('\0')).unwrap())
        };
        Self([DType::F32, DType::F16, DType::BF16, DType::E4M3].into_iter().map(module).collect())
    }

    fn run(&self, write: &Write, schedule: Schedule) -> (Result, Outcome) {
        let mut device = ptxsan::Device::new();
        let (_, module) = self.0.iter().find(|(dtype, _)| *dtype == write.dtype).unwrap();
        let id = device.load(module).unwrap();
        let tensors = write.tensors();
        let mut read = |name: &str, bytes: &[u8]| {
            let buffer = device.upload(name, bytes).unwrap();
            device.set_read_only(buffer, true).unwrap();
            buffer.address()
        };
        let list = |values: &Vec<i32>| bytemuck::cast_slice::<i32, u8>(values).to_vec();
        let lengths = read("lengths", &list(&write.lengths));
        let cu_new = write.cu_new.as_ref().map(|cu| read("cu_new", &list(cu)));
        let cu_q = write.cu_q.as_ref().map(|cu| read("cu_q", &list(cu)));
        let index = write.index.as_ref().map(|index| read("index", &list(index)));
        let first = write.rotary.as_ref().and_then(|turn| turn.first.clone());
        let first = first.map(|first| read("first", &list(&first)));
        let table = write.table.as_ref().map(|(entries, columns)| DeviceTable {
            address: read("table", &list(entries)),
            row_stride: *columns as i64,
            rows: entries.len() / columns,
            columns: *columns,
        });
        let new = [0, 1].map(|i| placed(&tensors.new[i], read(["k", "v"][i], tensors.new[i].bytes())));
        let q = placed(&tensors.q, read("q", tensors.q.bytes()));
        let angles = [0, 1].map(|i| {
            let (tensor, name) = (&tensors.angles[i], ["cos", "sin"][i]);
            (read(name, tensor.bytes()), tensor.view().strides()[2] as i64)
        });
        let caches =
            [0, 1].map(|i| device.upload(["k_cache", "v_cache"][i], tensors.caches[i].bytes()).unwrap());
        let q_out = device.upload("q_out", tensors.q_out.bytes()).unwrap();
        let filled = device.upload("filled", &vec![0xFF; 4 * write.batch()]).unwrap();
        let asked = CacheWrite {
            first,
            tokens: Some(DeviceNewTokens {
                new,
                caches: [0, 1].map(|i| placed(&tensors.caches[i], caches[i].address())),
                heads: write.heads[0],
                dims: write.dims,
                tokens: write.tokens,
                cu_seqlens: cu_new,
                blocks: write.cache[0],
                room: write.cache[1],
                table,
                cache_batch_idx: index,
                filled: Some(filled.address()),
            }),
            queries: write.rotary.as_ref().map(|turn| DeviceQueries {
                q,
                out: placed(&tensors.q_out, q_out.address()),
                heads: write.heads[1],
                dim: write.dims[0],
                tokens: write.queries,
                cu_seqlens: cu_q,
                advance: turn.advance,
            }),
            rotary: write.rotary.as_ref().map(|turn| DeviceRotary {
                dtype: turn.angles,
                cos: angles[usize::from(turn.swapped)],
                sin: angles[usize::from(!turn.swapped)],
                positions: turn.positions,
                columns: turn.columns,
                interleaved: turn.interleaved,
            }),
            ..CacheWrite::new(write.dtype, write.batch(), lengths)
        };
        let params = asked.params().unwrap();
        let grid = [params.blocks_needed().unwrap(), 1, 1];
        let args = vec![Arg::Bytes(bytemuck::bytes_of(&params).to_vec())];
        let mut launch = Launch::new("cache_write", grid, [128, 1, 1], 0, args);
        launch.options = Options { schedule, ..Options::default() };
        let outcome = device.launch(id, &launch).unwrap();
        let mut bytes = |buffer: Buffer| device.read(buffer).unwrap();
        let caches = caches.map(&mut bytes);
        let filled =
            bytes(filled).chunks(4).map(|four| i32::from_le_bytes(four.try_into().unwrap())).collect();
        (Result { caches, q: bytes(q_out), filled }, outcome)
    }

    /// The same bytes as the CPU's, under two schedules, and nothing found.
    fn agree(&self, name: &str, write: &Write) {
        let expected = write.expected();
        for schedule in [Schedule::ALL[0], Schedule::ALL[1]] {
            let (got, outcome) = self.run(write, schedule);
            assert!(outcome.is_clean(), "{name}: {}", outcome.findings[0]);
            assert_eq!(got.filled, expected.filled, "{name}");
            for (at, tensor) in ["k_cache", "v_cache"].into_iter().enumerate() {
                assert!(got.caches[at] == expected.caches[at], "{name}: {tensor} differs");
            }
            assert!(got.q == expected.q, "{name}: the turned queries differ");
        }
    }
}

fn placed(tensor: &Tensor, address: u64) -> DeviceTensor {
    let [block, head, token, _] = tensor.view().strides().map(|stride| stride as i64);
    DeviceTensor { address, strides: [block, head, token] }
}

#[test]
fn tokens_go_where_the_cpu_puts_them_bit_by_bit() {
    let kernels = Kernels::compile();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::E4M3] {
        kernels.agree("contiguous", &contiguous(dtype));
        kernels.agree("no row is aligned", &Write { gap: 3, dims: [16, 7], ..contiguous(dtype) });
        kernels.agree("pages", &paged(dtype));
    }
    let dtype = DType::BF16;
    kernels.agree("blocks by index", &Write { index: Some(vec![4, 1]), cache: [5, 8], ..contiguous(dtype) });
    kernels.agree("rows of the table by index", &Write { index: Some(vec![1, 0]), ..paged(dtype) });
    let one = Write { cache: [9, 1], table: Some((vec![5, 2, 0, 3, 8, 1, 4, 7], 4)), ..paged(dtype) };
    kernels.agree("pages of one", &Write { lengths: vec![2, 0], ..one });
    let lengths = vec![3, 0, 5, 8, 1];
    let packed = Write { cache: [5, 16], lengths, tokens: 9, ..contiguous(dtype) };
    // One sequence gets nothing, and two tokens at the end belong to none.
    kernels.agree("packed", &Write { cu_new: Some(vec![0, 2, 2, 6, 6, 7]), ..packed });
}

#[test]
fn keys_and_queries_are_turned_as_the_cpu_turns_them() {
    let kernels = Kernels::compile();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for interleaved in [false, true] {
            let turn = Turn { interleaved, ..TURN };
            kernels.agree("turned", &Write { rotary: Some(turn.clone()), ..contiguous(dtype) });
            let all = Turn { columns: 8, angles: dtype, ..turn };
            kernels.agree("whole rows", &Write { rotary: Some(all), gap: 1, ..paged(dtype) });
        }
    }
    let dtype = DType::BF16;
    let elsewhere = Turn { first: Some(vec![30, 7]), advance: false, columns: 3, ..TURN };
    kernels.agree("other positions", &Write { rotary: Some(elsewhere), ..contiguous(dtype) });
    let packed = Write { queries: 6, cu_q: Some(vec![1, 4, 5]), rotary: Some(TURN), ..paged(dtype) };
    kernels.agree("packed queries", &packed);
}

/// What differs by one page, one length, one angle must be told apart, or the comparison above proves nothing.
#[test]
fn small_differences_are_noticed() {
    let kernels = Kernels::compile();
    let write = Write { rotary: Some(TURN), ..paged(DType::BF16) };
    let expected = write.expected();
    let turned = |turn: Turn| Write { rotary: Some(turn), ..write.clone() };
    for (name, other) in [
        ("two pages swapped", Write { table: Some((vec![2, 5, 0, 3], 2)), ..write.clone() }),
        ("a length off by one", Write { lengths: vec![3, 1], ..write.clone() }),
        ("cosines for sines", turned(Turn { swapped: true, ..TURN })),
        ("neighbours for halves", turned(Turn { interleaved: true, ..TURN })),
        ("a position off by one", turned(Turn { first: Some(vec![4, 1]), ..TURN })),
        ("queries that stand still", turned(Turn { advance: false, ..TURN })),
    ] {
        let (got, outcome) = kernels.run(&other, Schedule::ALL[0]);
        assert!(outcome.is_clean() && got != expected, "{name}");
    }
}

/// Whatever lengths, pages and indices hold, nothing outside the caches is written, and what has a place gets there.
#[test]
fn tokens_without_a_place_are_left_out() {
    let kernels = Kernels::compile();
    let dtype = DType::BF16;
    let before = |write: &Write| write.tensors().caches.map(|cache| cache.bytes().to_vec());
    let nothing = [
        ("a negative length", Write { lengths: vec![-1, i32::MIN], ..paged(dtype) }),
        ("lengths past the cache", Write { lengths: vec![8, i32::MAX], ..contiguous(dtype) }),
        (
            "pages that are not there",
            Write { table: Some((vec![6, -1, i32::MAX, i32::MIN], 2)), ..paged(dtype) },
        ),
        ("blocks that are not there", Write { index: Some(vec![2, -1]), ..contiguous(dtype) }),
        ("rows that are not there", Write { index: Some(vec![i32::MAX, i32::MIN]), ..paged(dtype) }),
        (
            "cumulative lengths that are none",
            Write { cu_new: Some(vec![i32::MAX, i32::MIN, -5]), ..contiguous(dtype) },
        ),
        (
            "positions without angles",
            Write { rotary: Some(Turn { first: Some(vec![-3, 40]), ..TURN }), ..contiguous(dtype) },
        ),
    ];
    for (name, write) in nothing {
        let (got, outcome) = kernels.run(&write, Schedule::ALL[1]);
        assert!(outcome.is_clean(), "{name}: {}", outcome.findings[0]);
        assert!(got.caches == before(&write), "{name}: something was written");
        let room = if write.table.is_some() { 8 } else { write.cache[1] as i32 };
        assert!(got.filled.iter().all(|filled| (0..=room).contains(filled)), "{name}: {:?}", got.filled);
        if write.rotary.is_some() {
            let q: &[half::bf16] = bytemuck::cast_slice(&got.q);
            assert!(q.iter().all(|x| x.is_nan()), "{name}");
        }
    }
    // One sequence is full; the other gets its tokens.
    let half = Write { lengths: vec![8, 0], ..contiguous(dtype) };
    let (got, _) = kernels.run(&half, Schedule::ALL[0]);
    assert!(got.caches != before(&half) && got.filled == [8, 2]);
    let split = got.caches[0].len() / 2;
    assert_eq!(got.caches[0][..split], before(&half)[0][..split]);
}
