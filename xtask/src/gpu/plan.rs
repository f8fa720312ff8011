//! The steps, the most valuable first: what says whether kernels are right, then what says how fast the library is.

use std::time::Duration;

/// One program run, and the document it leaves.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Its document's name.
    pub(super) name: String,
    /// What it answers.
    pub(super) asks: &'static str,
    /// What runs.
    pub(super) program: Program,
    /// What it takes on an H200 with 16 cores. It is not begun with less time than this.
    pub(super) about: Duration,
    /// It is ended after this: fewer cores or a slower GPU take their time, a program that hangs does not.
    pub(super) limit: Duration,
    /// The exit status that is a success: 1 where something must be turned away.
    pub(super) expected: i32,
}

#[derive(Clone, Debug)]
pub(super) enum Program {
    /// `evosdpa` with these arguments and `--json`.
    Evosdpa(Vec<String>),
    /// An example of the workspace, which prints a document.
    Example(&'static str),
    /// A Python program that writes a document to its argument.
    Python(&'static str),
}

/// What the library chooses from. `bench` times its choice beside them.
const FAST: &str = "ampere_fwd,hopper_small,hopper_fwd";
/// All that it may take, the one for few queries against a cache included.
const ALL: &str = "ampere_fwd,hopper_small,hopper_fwd,hopper_wide,flash_decode";
/// Those with the one that reads f32.
const SANITIZED: &str = "ampere_fwd,hopper_small,hopper_fwd,hopper_wide,flash_decode,ampere_f32";
const LINE: &str = "sdpa_v1,sdpa_v2b,sdpa_v2c,fa_s512_v3,sdpa_fp8_stage_c";
const NAMED: &str = "mission,mission:causal,small,small:causal,long,long:causal,long128,long128:causal";
/// One query or few, a long cache, grouped heads.
const DECODE: &str = "b1h32/8s1/1024d128,b1h32/8s1/8192d128,b4h32/8s1/4096d128,b8h64/8s1/4096d128,b16h32/8s1/8192d128,\
                      b64h32/8s1/2048d128,b128h64/8s1/1024d128,b16h32/8s16/4096d128";
/// Grouped heads and every path of the Hopper kernels: few and many keys, whole and ragged tiles, both alignments, windows.
const PATHS: &str = "b1h8s640d64,b1h8s640d64:causal,b1h8/2s700d128:causal-br,b2h4s1024d128:causal,b1h4s2048d64:window=300/0,\
                     b1h4/1s513/1100d256,b1h32/8s1/8192d128,b1h4s511d96:causal,b1h4/1s513/1100d512:causal-br,b1h2s640d320";
/// Packed sequences, filled parts of caches, pages of every size, i8 caches, and each modifier of scores.
const KINDS: &str = "b3h8/2s130d128:causal-br:varlen,b2h4s257d64:causal:varlen,b5h4/2s90d96:varlen=q:used,b4h8/2s1/1000d128:used:paged=16,\
                     b3h4/1s17/700d64:used:paged=1,b2h8/2s64/900d128:causal-br:used:paged=256,b3h4s700d128:causal-br:varlen:softcap=50,\
                     b2h4s300d64:softcap=30,b2h4s300d128:causal-br:alibi,b2h4s300d64:bias=h,b2h4s130d256:causal:bias=bh,b2h4s300d128:mask=b,\
                     b2h4s333d64:mask=bhk,b2h4s512d128:mask=b,b1h4s1024d64:bias=h,\
                     b1h4s1100d128:softcap=5,b2h4s200d64:causal:softcap=4:sinks,b2h4s500d64:blocks=h64,b1h4s700d128:causal:blocks=128,b2h4s300d64:causal:chunk=100,b2h8/2s300d64:window=127/0:sinks,b2h4s200d128:causal:softcap=20:sinks,\
                     b1h4/2s1/300d64:used:paged=16:kv=i8,b3h8/2s20/900d128:window=255/0:used:paged=16:kv=i8:scales=token";
/// f32: each tile, masks, lengths, pages and modifiers.
const F32: &str = "b1h4/2s300/513d64:causal-br,b2h2s257d128,b1h2s130d256:causal,b1h2s77/900d100,b3h2s200d64:causal-br:varlen,\
                   b2h2s99/400d96:used:paged=16:softcap=30,b2h4s300d64:bias=h,b2h4s300d128:mask=b:sinks,b2h4s300d64:blocks=h64";
/// What models ask for besides: heads of 72 and 512 columns (256 beside them), a window, and modified scores with the plain problem beside them.
const MODELS: &str = "b8h16s2048d128:causal,b8h16s2048d128:causal:alibi,b8h16s2048d128:causal:softcap=5,b8h16s2048d128:causal:softcap=50,\
                      b8h16s2048d128:mask=b,b8h16s2048d128:bias=h,b1h4s8192d512,b2h8s4096d256,b2h8s4096d512:causal,b4h16s4096d72,\
                      b4h16s4096d72:causal,b1h16s8192d64:window=255/0";
/// What a server asks for: prompts, pages of two sizes, e4m3 codes with scales of every reach and i8 codes with one for each token.
const SERVING: &str = "b16h32/8s1/8192d128:used:paged=16,b16h32/8s1/8192d128:used:paged=1,\
                       b16h32/8s1/8192d128:used:kv=e4m3,b16h32/8s1/8192d128:used:paged=16:kv=e4m3:scales=token,\
                       b1h32/8s1/131072d128:kv=e4m3:scales=tensor,b16h32/8s1/8192d128:used:paged=16:kv=i8:scales=token";
/// Packed prompts, and how long their sequences are: equal, one long among short ones, short ones, single tokens beside two prompts.
const PACKED: [(&str, &str); 4] = [
    ("b16h32/8s1024d128:causal-br:varlen", "equal"),
    ("b64h32/8s16384d128:causal-br:varlen", "16384,63x100-534"),
    ("b256h32/8s191d128:causal-br:varlen", "256x64-191"),
    ("b62h32/8s2048d128:causal-br:varlen", "60x1,2x2048"),
];
/// Where every output of a thousand calls must be the same bits.
const REPEATED: &str = "mission,mission:causal,small:causal,long:causal,b1h32/8s1/8192d128";

/// `bench` of [`PACKED`].
fn packed_arguments() -> Vec<&'static str> {
    let mut arguments = vec!["bench", "--device", "cuda"];
    for (shape, lengths) in PACKED {
        arguments.extend(["--shapes", shape, "--lengths", lengths]);
    }
    arguments.extend(["--baselines", "flash-attn-3", "--budget", "3"]);
    arguments
}

/// What is built for steps that are examples.
pub(super) const EXAMPLES: [(&str, &str); 2] =
    [("evosdpa", "device_pointers"), ("evosdpa-lab", "sim_agreement")];

/// Every step, in order.
pub(super) fn steps() -> Vec<Step> {
    let mut steps = vec![
        evosdpa(
            "check-fast",
            "are the library's kernels right?",
            50,
            &["check", "--device", "cuda", "--kernels", ALL],
        ),
        evosdpa(
            "check-paths",
            "is every path of the Hopper kernels right, with more than 256 keys too?",
            30,
            &[
                "check",
                "--device",
                "cuda",
                "--kernels",
                ALL,
                "--shapes",
                PATHS,
                "--dtype",
                "bf16,f16",
                "--seeds",
                "1",
            ],
        ),
        evosdpa(
            "check-kinds",
            "are packed sequences, pages and modified scores right?",
            35,
            &[
                "check",
                "--device",
                "cuda",
                "--kernels",
                "ampere_fwd,hopper_fwd,flash_decode",
                "--shapes",
                KINDS,
                "--dtype",
                "bf16,f16",
                "--seeds",
                "1",
            ],
        ),
        evosdpa(
            "check-f32",
            "is the kernel right that reads f32?",
            15,
            &[
                "check",
                "--device",
                "cuda",
                "--kernels",
                "ampere_f32",
                "--shapes",
                F32,
                "--dtype",
                "f32",
                "--seeds",
                "1",
            ],
        ),
        evosdpa(
            "named",
            "how fast is what the library would run, beside PyTorch's backends?",
            120,
            &["bench", "--device", "cuda", "--kernels", FAST, "--shapes", NAMED],
        ),
        step(
            "library-path",
            "the library: values, host time, graphs, threads",
            15,
            Program::Example("device_pointers"),
        ),
        step(
            "start",
            "what does the first call of a process take, with kernels that came along and without?",
            60,
            Program::Python("crates/python/tests/gpu/start.py"),
        ),
        step(
            "python",
            "the Python package on CUDA tensors, and a model",
            85,
            Program::Python("crates/python/tests/gpu/check.py"),
        ),
        step(
            "model-1b",
            "a model of 1.1 billion weights in transformers: prefill and generation beside sdpa",
            80,
            Program::Python("crates/python/tests/gpu/model.py"),
        ),
        step(
            "modifiers",
            "what softcap, sinks, ALiBi, masks, biases, padding and windows cost",
            40,
            Program::Python("crates/python/tests/gpu/modifiers.py"),
        ),
    ];
    for dim in [64, 128, 256] {
        for (suffix, mask) in [("", ""), ("-causal", ":causal")] {
            let shapes = grid(dim, mask);
            let arguments = [
                "bench",
                "--device",
                "cuda",
                "--shapes",
                &shapes,
                "--baselines",
                "cudnn,flash-attn-3",
                "--budget",
                "1.5",
            ];
            steps.push(evosdpa(
                &format!("grid-d{dim}{suffix}"),
                "FlashAttention-3's grid, 16k tokens, beside it where Python has it",
                80,
                &arguments,
            ));
        }
    }
    steps.extend([
        evosdpa(
            "decode",
            "one query and few against a long cache",
            90,
            &[
                "bench",
                "--device",
                "cuda",
                "--kernels",
                "flash_decode",
                "--shapes",
                DECODE,
                "--baselines",
                "flash,cudnn,flash-attn-3",
                "--budget",
                "3",
            ],
        ),
        evosdpa(
            "models",
            "head dimensions, a window and modified scores, as the library runs them",
            150,
            &[
                "bench",
                "--device",
                "cuda",
                "--shapes",
                MODELS,
                "--baselines",
                "cudnn,efficient",
                "--budget",
                "1",
            ],
        ),
        evosdpa(
            "serving",
            "decoding from pages and from 8-bit caches",
            120,
            &["bench", "--device", "cuda", "--shapes", SERVING, "--budget", "3", "--no-baselines"],
        ),
        evosdpa(
            "packed",
            "packed prompts of equal and of other lengths, beside FlashAttention-3's packed form where Python has it",
            100,
            &packed_arguments(),
        ),
        evosdpa(
            "repeats",
            "are a thousand outputs the same bits?",
            90,
            &[
                "check",
                "--device",
                "cuda",
                "--kernels",
                ALL,
                "--shapes",
                REPEATED,
                "--dtype",
                "bf16",
                "--seeds",
                "1",
                "--runs",
                "1000",
                "--families",
                "normal,large-logits",
            ],
        ),
        evosdpa(
            "check-schedules",
            "is every tile and schedule of the library's kernels right?",
            65,
            &["check", "--device", "cuda", "--kernels", ALL, "--dtype", "bf16", "--all-variants", "48"],
        ),
        evosdpa(
            "sanitize-fast",
            "memcheck, racecheck, initcheck, synccheck of the library's kernels",
            40,
            &["sanitize", "--kernels", SANITIZED],
        ),
        evosdpa(
            "check-line",
            "is the line of kernels right?",
            60,
            &["check", "--device", "cuda", "--kernels", LINE],
        ),
        evosdpa(
            "check-variants",
            "is every variant of the line right?",
            110,
            &["check", "--device", "cuda", "--kernels", LINE, "--all-variants"],
        ),
        evosdpa("sanitize-line", "compute-sanitizer on the line", 30, &["sanitize", "--kernels", LINE]),
        evosdpa(
            "mutants",
            "do the gates catch kernels that are known to be wrong?",
            45,
            &["sanitize", "--mutants"],
        ),
        evosdpa(
            "line",
            "how fast is the line?",
            30,
            &[
                "bench",
                "--device",
                "cuda",
                "--kernels",
                LINE,
                "--shapes",
                "mission,mission:causal",
                "--no-baselines",
            ],
        ),
        evosdpa(
            "line-u8",
            "how fast is stage C, which reads codes?",
            20,
            &[
                "bench",
                "--device",
                "cuda",
                "--kernels",
                "sdpa_fp8_stage_c",
                "--dtype",
                "u8",
                "--shapes",
                "mission,mission:causal",
                "--no-baselines",
            ],
        ),
        Step {
            expected: 1,
            ..evosdpa(
                "cheats",
                "are cheats turned away?",
                20,
                &[
                    "bench",
                    "--device",
                    "cuda",
                    "--kernel-path",
                    "crates/lab/tests/cheats",
                    "--kernels",
                    CHEATS,
                    "--shapes",
                    "b1h2s512d64",
                    "--no-baselines",
                ],
            )
        },
        evosdpa(
            "import-matmuls",
            "is an answer to a KernelBench task judged?",
            15,
            &[
                "import",
                "kernelbench",
                "examples/submissions/matmuls.py",
                "--device",
                "cuda",
                "--shape",
                "mission:causal",
            ],
        ),
        evosdpa(
            "import-triton",
            "and one to a GPU MODE task, in Triton?",
            15,
            &[
                "import",
                "gpumode",
                "examples/submissions/flash_triton.py",
                "--device",
                "cuda",
                "--shape",
                "b2h8s1024d64",
            ],
        ),
        Step {
            expected: 1,
            ..evosdpa(
                "import-cached",
                "and is one turned away that computes once only?",
                15,
                &[
                    "import",
                    "gpumode",
                    "examples/submissions/cached.py",
                    "--device",
                    "cuda",
                    "--shape",
                    "mission",
                ],
            )
        },
        evosdpa(
            "keeps-l2",
            "does asking L2 to keep the inputs gain nothing once it is flushed?",
            15,
            &[
                "bench",
                "--device",
                "cuda",
                "--timing",
                "cold",
                "--kernel-path",
                "crates/lab/tests/cheats",
                "--kernels",
                "cheat_honest,cheat_keeps_l2",
                "--shapes",
                "b4h8s512d64",
                "--no-baselines",
            ],
        ),
        step(
            "sim-agreement",
            "does the simulator give what the GPU gives?",
            45,
            Program::Example("sim_agreement"),
        ),
        evosdpa(
            "profile-hopper",
            "what holds the kernels back, by Nsight Compute",
            60,
            &["profile", "--shape", "mission,long128", "--kernels", "hopper_small,hopper_fwd,ampere_fwd"],
        ),
        self_test("self-test", "how often is a kernel called faster than itself?", &[]),
        self_test("self-test-single", "and where a reading is one launch?", &["--timing", "single"]),
    ]);
    steps
}

/// The cheats alone: the honest one among them would pass, and the step is there to see each of these fail.
const CHEATS: &str = "cheat_zeros,cheat_copies_v,cheat_cached_by_pointer,cheat_skips_after_warm_up,cheat_right_at_first,\
                      cheat_changes_inputs,cheat_one_call_of_three,cheat_writes_astray,cheat_trusts_finished_outputs,\
                      cheat_mean_of_v,cheat_low_precision,cheat_cached_by_content,cheat_batched,cheat_writes_nothing";

/// 16k tokens, H·D = 2048, lengths 512 to 16k.
fn grid(dim: usize, mask: &str) -> String {
    let shape = |length: usize| format!("b{}h{}s{length}d{dim}{mask}", 16384 / length, 2048 / dim);
    [512, 1024, 2048, 4096, 8192, 16384].map(shape).join(",")
}

fn self_test(name: &str, asks: &'static str, timing: &[&str]) -> Step {
    let kernel = ["bench", "--device", "cuda", "--kernels", "hopper_small", "--shapes", "mission"];
    evosdpa(name, asks, 30, &[&kernel[..], timing, &["--self-test", "60"]].concat())
}

fn evosdpa(name: &str, asks: &'static str, seconds: u64, arguments: &[&str]) -> Step {
    step(name, asks, seconds, Program::Evosdpa(arguments.iter().map(|part| (*part).to_owned()).collect()))
}

fn step(name: &str, asks: &'static str, seconds: u64, program: Program) -> Step {
    let about = Duration::from_secs(seconds);
    let limit = about * 3 + Duration::from_secs(30);
    Step { name: name.to_owned(), asks, program, about, limit, expected: 0 }
}
