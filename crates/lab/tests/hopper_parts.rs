//! The parts of the Hopper kernels that need no Hopper GPU, on the CPU: the orders in which `hopper_fwd` works on its Q tiles, and the
//! rows that `hopper_small` computes again.

use std::{collections::BTreeMap, fs, path::Path};

use evosdpa_core::DType;
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Arch, ProblemFacts, Registry, SdpaParams, Target, Variant};
use evosdpa_lab::device::Sim;
use evosdpa_oracle::{Case, inputs::Family};
use ptxsan::{Arg, Device, Launch, Module, Options, Schedule};

/// Every block walks its list and counts its visits.
const WALK: &str = r#"
#include "scheduler.cuh"

extern "C" __global__ void walk(const __grid_constant__ SdpaParams p, int* visits, int* longest_first) {
  int last = 1 << 30;
  for (TileScheduler schedule; !schedule.done(p); schedule.advance(p)) {
    const Work work = schedule.work(p);
    atomicAdd(&visits[work.head * TileScheduler::m_blocks(p) + work.m_block], 1);
    if (work.m_block > last) atomicExch(longest_first, 0);
    last = work.m_block;
  }
}
"#;

/// What may differ, as in the manifest.
#[derive(Clone, Copy, Debug)]
struct Order {
    persistent: i64,
    paired: i64,
    longest_first: i64,
    section_mib: i64,
    pack_heads: i64,
}

const PLAIN: Order = Order { persistent: 1, paired: 0, longest_first: 0, section_mib: 0, pack_heads: 1 };

impl Order {
    fn variant(self) -> Variant {
        let any = evosdpa_core::Problem::new("mission".parse().unwrap(), DType::F16).unwrap();
        let facts = ProblemFacts::try_from(&any).unwrap();
        let registry = Registry::embedded().unwrap();
        let kernel = registry.kernel("hopper_fwd").unwrap();
        let defines = [
            ("PERSISTENT", self.persistent),
            ("PAIRED", self.paired),
            ("LONGEST_FIRST", self.longest_first),
            ("SECTION_MIB", self.section_mib),
            ("PACK_HEADS", self.pack_heads),
            ("CONSUMERS", 2),
            ("BLOCK_N", 128),
            ("HEAD_DIM", 256),
            ("VALUE_DIM", 256),
            ("PRECISE_KEYS", 256),
            ("DTYPE_BF16", 0),
            ("PACKED_QUERIES", 0),
            ("PACKED_KEYS", 0),
            ("USED_LENGTHS", 0),
            ("USED_QUERIES", 0),
            ("CHUNKED", 0),
            ("BLOCK_MASK", 0),
        ];
        Variant {
            source: WALK.into(),
            source_file: "hopper/walk.cu".to_owned(),
            entry: "walk".to_owned(),
            arch: Arch::Sm89,
            defines: defines.map(|(name, value)| (name.to_owned(), value)).into(),
            ..kernel.variant(&facts, &Target::nominal(Arch::Sm90a), []).unwrap()
        }
    }

    /// Q tiles of 128 rows.
    fn m_blocks(self, seq_q: i32) -> i64 {
        let rows = 128 / self.pack_heads;
        (i64::from(seq_q) + rows - 1) / rows
    }

    fn units_per_head(self, seq_q: i32) -> i64 {
        let blocks = self.m_blocks(seq_q);
        let precise = (256 * self.pack_heads + 127) / 128;
        match self.paired {
            0 => blocks,
            2 if blocks > 2 * precise + 1 => (blocks + 1) / 2 + 1,
            _ => (blocks + 1) / 2,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Problem {
    batch: i32,
    heads_q: i32,
    heads_kv: i32,
    seq_q: i32,
}

/// One CTA, fewer and more than there is work for, sections of several heads and sections that do not come out even.
const PROBLEMS: [Problem; 5] = [
    Problem { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 1 },
    Problem { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 700 },
    Problem { batch: 1, heads_q: 14, heads_kv: 7, seq_q: 1025 },
    Problem { batch: 3, heads_q: 6, heads_kv: 3, seq_q: 384 },
    Problem { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 2048 },
];

/// Runs the walk with so many CTAs and returns how often each Q tile was visited, whether every CTA's blocks came
/// longest first, and what the counter was left at.
fn walk(
    module: &Module,
    order: Order,
    problem: Problem,
    workers: i64,
    counter: bool,
    schedule: Schedule,
) -> (Vec<i32>, bool, u32) {
    let Problem { batch, heads_q, heads_kv, seq_q } = problem;
    let mut device = Device::new();
    let id = device.load(module).unwrap();
    let blocks = order.m_blocks(seq_q) * i64::from(heads_q / order.pack_heads as i32 * batch);
    let visits = device.upload("visits", &vec![0; 4 * blocks as usize]).unwrap();
    let longest_first = device.upload("longest_first", &1_i32.to_le_bytes()).unwrap();
    let word = device.upload("counter", &0_u32.to_le_bytes()).unwrap();
    let params = SdpaParams {
        batch,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv: 4096,
        counter: if counter { word.address() } else { 0 },
        ..SdpaParams::default()
    };
    let args = vec![
        Arg::Bytes(bytemuck::bytes_of(&params).to_vec()),
        Arg::Buffer(visits),
        Arg::Buffer(longest_first),
    ];
    let grid = workers as u32;
    let launch = Launch::new("walk", [grid, 1, 1], [1, 1, 1], 0, args).with_schedule(schedule, 3);
    let outcome = device.launch(id, &launch).unwrap();
    assert!(outcome.is_clean(), "{order:?} {problem:?}\n{outcome}");
    let ints = |bytes: Vec<u8>| -> Vec<i32> {
        bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let ordered = ints(device.read(longest_first).unwrap())[0] == 1;
    (ints(device.read(visits).unwrap()), ordered, ints(device.read(word).unwrap())[0] as u32)
}

#[test]
fn every_q_tile_has_its_turn_once_and_the_counter_is_left_at_zero() {
    let orders = [
        PLAIN,
        Order { paired: 1, ..PLAIN },
        Order { longest_first: 1, ..PLAIN },
        Order { longest_first: 1, section_mib: 8, pack_heads: 2, ..PLAIN },
        Order { persistent: 0, longest_first: 1, section_mib: 8, ..PLAIN },
        Order { persistent: 2, ..PLAIN },
        Order { persistent: 2, paired: 1, ..PLAIN },
        Order { paired: 2, ..PLAIN },
        Order { persistent: 2, paired: 2, ..PLAIN },
        Order { persistent: 2, paired: 2, pack_heads: 2, ..PLAIN },
        Order { persistent: 2, longest_first: 1, section_mib: 8, ..PLAIN },
    ];
    let mut walked = BTreeMap::new();
    for order in orders {
        let artifact = Builder::default().ptx(&order.variant()).unwrap();
        let module = Module::parse(artifact.ptx()).unwrap();
        for problem in PROBLEMS {
            let heads = i64::from(problem.heads_q) / order.pack_heads * i64::from(problem.batch);
            let units = heads * order.units_per_head(problem.seq_q);
            // The launch never has more CTAs than units.
            let workers = if order.persistent == 0 { units } else { units.min(7) };
            for counter in [true, false] {
                for schedule in [Schedule::ALL[0], Schedule::ALL[1]] {
                    let (visits, ordered, left) = walk(&module, order, problem, workers, counter, schedule);
                    let expected = vec![1; visits.len()];
                    assert_eq!(
                        visits, expected,
                        "{order:?} {problem:?}, {workers} workers, counter: {counter}"
                    );
                    assert_eq!(left, 0, "{order:?} {problem:?}");
                    if order.longest_first == 1 && order.section_mib == 0 {
                        assert!(ordered, "{order:?} {problem:?}");
                    }
                    *walked.entry(order.persistent).or_insert(0) += visits.len();
                }
            }
        }
    }
    assert!(walked.values().all(|blocks| *blocks > 500), "{walked:?}");
}

/// Every row by itself.
const AGAIN: &str = r#"
#include "nonfinite_fallback.cuh"

extern "C" __global__ void again(const __grid_constant__ SdpaParams p) {
  const int row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  element* o = static_cast<element*>(p.o) + batch * p.o_stride[0] + head * p.o_stride[1] + row * p.o_stride[2];
  float* lse = p.lse ? p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1] + row : nullptr;
  nonfinite_fallback(p, batch, head, head / (p.heads_q / p.heads_kv), row, 0, p.dim_v, o, lse);
}
"#;

const AGAIN_MANIFEST: &str = r#"
schema = 1
name = "again"
summary = "rows computed again"
source = "again.cu"
entry = "again"
archs = ["sm_89"]
tolerance = "half"
deterministic = true

[problem]
dtypes = ["f16", "bf16"]
head_dim = { min = 1, max = 256 }
value_dim = "any"
masks = ["full", "causal", "window"]
gqa = true
lse = true

[launch]
block = ["4", "1", "1"]
grid = ["seq_q", "heads_q", "batch"]
dynamic_smem = "0"

[defines]
DTYPE_BF16 = "dtype == bf16"

[limits.sm_89]
registers = 255
smem_bytes = 0
stack_bytes = 0
spill_bytes = 0
"#;

#[test]
fn a_row_computed_again_is_right_and_knows_no_hidden_key() {
    let folder = tempfile::tempdir().unwrap();
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/cuda/hopper/nonfinite_fallback.cuh");
    fs::copy(header, folder.path().join("nonfinite_fallback.cuh")).unwrap();
    fs::write(folder.path().join("again.cu"), AGAIN).unwrap();
    fs::write(folder.path().join("again.toml"), AGAIN_MANIFEST).unwrap();
    let mut registry = Registry::embedded().unwrap();
    registry.add_folder(folder.path()).unwrap();
    let sim = Sim::open(registry).unwrap();
    for shape in [
        "b1h2/1s5/9d40:causal",
        "b2h2s3/7d64/37:causal-br",
        "b1h1s6/3d33:window=2/0",
        "b1h2s4/11d16:window-tl=1/1",
    ] {
        for dtype in [DType::F16, DType::BF16] {
            let problem = evosdpa_core::Problem::new(shape.parse().unwrap(), dtype).unwrap().with_lse(true);
            let case = Case::new(problem, Family::HiddenKeys, 1, Some(8));
            let simulation = sim.simulation("again", &problem).unwrap();
            let (output, outcome) = simulation.run(&case.inputs, &Options::default()).unwrap();
            assert!(outcome.is_clean(), "{shape} {dtype}\n{outcome}");
            let judgement = case.judge(&output.o.view(), output.lse.as_deref());
            assert!(judgement.passed(), "{shape} {dtype}: {}", judgement.summary());
        }
    }
}
