//! What a problem can say beyond sizes and a mask, in the CUDA kernels on the simulator: every result held against the
//! oracle, every access watched, rows of nobody zeros.

mod trials;

use evosdpa_core::{DType, Feature, Layout, SideInputs, Tensor};
use evosdpa_kernels::Registry;
use evosdpa_lab::device::Sim;
use evosdpa_oracle::{Question, inputs::Family, solve};
use ptxsan::Options;
use trials::{BF16, F16, F32, Trial, case_of, run_all, trial};

/// Modifiers by themselves and together, under every mask, on tiles that are not whole; one with several warps a row.
#[test]
fn ampere_fwd_changes_scores() {
    run_all(&[
        trial("ampere_fwd", "b1h2/1s20/70d64:softcap=30", F16),
        trial("ampere_fwd", "b1h2s33/40d40:causal:softcap=0.5", BF16),
        trial("ampere_fwd", "b1h4/2s20/90d64:causal-br:alibi", BF16),
        trial("ampere_fwd", "b2h2s9/33d16:alibi", F16),
        trial("ampere_fwd", "b1h2s30/70d64:window=20/0:sinks", BF16),
        trial("ampere_fwd", "b1h2s70/20d64:causal-br:sinks", F16),
        trial("ampere_fwd", "b2h2/1s20/35d64:bias", BF16),
        trial("ampere_fwd", "b2h2s20/35d64:causal:bias=bh", F16),
        trial("ampere_fwd", "b2h2s9/70d64:bias=hk", F16),
        trial("ampere_fwd", "b2h2s20/70d64:mask=b", BF16),
        trial("ampere_fwd", "b2h2/1s20/33d64:causal-br:mask=hk", F16),
        trial("ampere_fwd", "b1h2s40/70d64:chunk=16", F16),
        trial("ampere_fwd", "b1h2s70/40d64:causal-br:chunk=8", BF16),
        trial(
            "ampere_fwd[BLOCK_M=32 WARPS_M=2 WARPS_N=2]",
            "b2h2s20/70d64:window=30/9:softcap=5:alibi:bias=b:mask:chunk=32:sinks",
            F16,
        ),
        trial("ampere_fwd[BLOCK_M=32 WARPS_M=2 WARPS_N=1]", "b1h2s20/70d64:softcap=5:mask=h:sinks", BF16),
        Trial { family: Family::HiddenKeys, ..trial("ampere_fwd", "b2h2s20/33d64:mask=b", F16) },
        Trial { family: Family::LargeLogits, ..trial("ampere_fwd", "b1h2s20/33d64:softcap=30:sinks", F16) },
    ]);
}

/// Block masks of every reach, with other masks and lengths; more KV tiles than lanes; Q tiles that see nothing.
#[test]
fn ampere_kernels_walk_block_tables() {
    const NARROW: &str = "ampere_fwd[BLOCK_M=16 BLOCK_N=32 WARPS_M=1 WARPS_N=2 STAGES=2]";
    run_all(&[
        trial("ampere_fwd", "b1h2s200/400d16:blocks=h64", F16),
        trial("ampere_fwd[SPLIT_MASKED_LOOP=1 STAGES=2]", "b2h2/1s70/300d16:causal-br:blocks=b128/64", BF16),
        trial(NARROW, "b1h1s9/2300d16:blocks=64", F16),
        trial(NARROW, "b2h2s20/700d16:window=300/0:blocks=bh64:sinks", BF16),
        trial("ampere_fwd", "b3h2s70/300d16:varlen:blocks=b64:mask=b", BF16),
        trial("ampere_f32[BLOCK_N=64]", "b1h2s70/200d16:blocks=h64", F32),
        Trial { family: Family::HiddenKeys, ..trial("ampere_fwd", "b1h2s70/400d16:blocks=h64", F16) },
    ]);
}

/// The same on TMA and wgmma: one warpgroup and two, tiles that are whole and tiles that end with the keys, scores that are changed.
#[test]
fn hopper_fwd_walks_block_tables() {
    run_all(&[
        trial("hopper_fwd", "b1h2s200/400d64:blocks=h128/64", F16),
        trial("hopper_fwd[CONSUMERS=1 PERSISTENT=2]", "b2h2/1s70/300d40:causal-br:blocks=b64", BF16),
        trial("hopper_fwd[BLOCK_N=128]", "b1h1s130/700d64:window=300/0:blocks=128:softcap=20:sinks", BF16),
        trial("hopper_fwd", "b2h1s20/512d64:blocks=b128:mask=k", F16),
        trial("hopper_fwd[STORE_DIRECT=1 Q_STAGES=1]", "b1h1s130/512d128:chunk=200:blocks=128", BF16),
        Trial { family: Family::HiddenKeys, ..trial("hopper_fwd", "b1h2s20/512d64:blocks=h128", BF16) },
    ]);
}

/// Zero times NaN is NaN: whoever computes a hidden tile shows it.
#[test]
fn hidden_tiles_are_not_computed() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for (kernel, shape, dtype) in SKIPPED {
        let (spec, case) = case_of(&trial(kernel, shape, dtype));
        let mut inputs = case.inputs.clone();
        let ([_, _, _, dim], [_, _, stride, _]) = (inputs.v.view().shape(), inputs.v.view().strides());
        // The block of keys that every drawn table hides.
        for key in 3 * 64..4 * 64 {
            inputs.v.bytes_mut()[key * stride * dtype.bytes()..][..dim * dtype.bytes()].fill(0xFF);
        }
        let simulation = sim.simulation(kernel, &spec.problem).unwrap();
        let (output, outcome) = simulation.run(&inputs, &Options::default()).unwrap();
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        assert!(
            judgement.passed() && outcome.findings.is_empty(),
            "{kernel} {shape}: {}",
            judgement.summary()
        );
    }
}

const SKIPPED: [(&str, &str, DType); 3] = [
    ("hopper_fwd", "b1h1s128/400d64:blocks=128/64", BF16),
    ("ampere_fwd", "b1h1s64/400d16:blocks=64", BF16),
    ("ampere_f32", "b1h1s64/400d16:blocks=64", F32),
];

/// Lengths that are data: skewed, empty, single tokens, equal; every alignment of the mask.
#[test]
fn ampere_fwd_reads_lengths_on_the_device() {
    let seeds = |shape, dtype| [1, 2, 3, 4].map(|seed| Trial { seed, ..trial("ampere_fwd", shape, dtype) });
    let mut trials = Vec::new();
    trials.extend(seeds("b5h2/1s40/70d64:varlen", F16));
    trials.extend(seeds("b4h2s50/33d40:causal-br:varlen", BF16));
    trials.extend([
        trial("ampere_fwd", "b3h2s9/70d64:causal:varlen=kv", F16),
        trial("ampere_fwd", "b3h2s70/9d64:window=9/2:varlen=q", BF16),
        trial("ampere_fwd", "b3h4/2s9/70d64:causal-br:used", BF16),
        trial("ampere_fwd", "b3h2s9/70d64:window-tl=9/2:varlen:used", F16),
        trial(
            "ampere_fwd",
            "b3h2s20/70d64:causal-br:varlen:softcap=9:alibi:bias=bh:mask=b:chunk=16:sinks",
            F16,
        ),
        // more sequences than lanes, few CTAs: each takes many Q tiles from the counter
        Trial { blocks: 2, ..trial("ampere_fwd", "b40h1s20d16:causal-br:varlen", F16) },
        Trial {
            blocks: 1,
            seed: 2,
            ..trial("ampere_fwd[BLOCK_M=16 WARPS_M=1 WARPS_N=2]", "b3h2s40/50d64:varlen", BF16)
        },
    ]);
    run_all(&trials);
}

/// Pages of every kind of size, in every order.
#[test]
fn ampere_fwd_gathers_pages() {
    let mut trials = Vec::new();
    for (at, shape) in [
        "b3h4/2s9/70d64:causal-br:used:paged=16",
        "b3h2s9/33d64:used:paged=1",
        "b2h2s9/70d40:paged=7",
        "b2h2s9/300d64:varlen=q:used:paged=256",
        "b2h2/1s1/100d64:used:paged=64",
    ]
    .into_iter()
    .enumerate()
    {
        for seed in [1, 5, 9, 13] {
            let dtype = if (at + seed as usize).is_multiple_of(2) { F16 } else { BF16 };
            trials.push(Trial { seed, ..trial("ampere_fwd", shape, dtype) });
        }
    }
    run_all(&trials);
}

/// Queries, paddings and cache blocks of each sequence's own, alone and with what they may meet.
#[test]
fn ampere_fwd_finds_each_sequences_place() {
    run_all(&[
        trial("ampere_fwd", "b3h2s70/40d64:causal-br:used-q", F16),
        trial("ampere_fwd", "b3h2s40/70d40:window=9/2:varlen:used:used-q", BF16),
        Trial { seed: 2, ..trial("ampere_fwd", "b3h4/2s9/70d64:causal-br:leftpad", BF16) },
        trial("ampere_fwd", "b3h4/2s9/70d64:alibi:used:leftpad:indexed", F16),
        trial("ampere_fwd", "b3h2s9/70d64:causal:varlen=kv:leftpad", F16),
        trial("ampere_fwd", "b3h2s9/70d64:causal-br:used:leftpad:indexed:paged=16:bias=bh:mask=b", BF16),
        Trial { seed: 3, ..trial("ampere_fwd", "b4h2s9/33d64:indexed:paged=5", F16) },
    ]);
}

/// Heads of more than 256 columns: two CTAs share the values of a Q tile, which need not be halved evenly; one of them writes the
/// log-sum-exp.
#[test]
fn ampere_fwd_takes_wide_heads() {
    const SMALL: &str = "ampere_fwd[BLOCK_M=32 BLOCK_N=32 WARPS_M=2 WARPS_N=2]";
    run_all(&[
        trial("ampere_fwd", "b1h2/1s40/70d512:causal-br", BF16),
        trial(SMALL, "b1h2s20/33d320:causal", F16),
        trial(SMALL, "b2h1s9/40d257:window=9/2", BF16),
        trial("ampere_fwd[BLOCK_M=64 BLOCK_N=32 WARPS_M=4]", "b1h1s20/33d16/301", F16),
        trial(SMALL, "b1h1s9/40d400/24:softcap=5:bias=h:mask:sinks", F16),
        Trial { blocks: 2, ..trial(SMALL, "b3h2s40/50d24/512:causal-br:varlen:alibi", BF16) },
        Trial { seed: 5, ..trial(SMALL, "b2h2/1s9/70d300:used:leftpad:paged=7", F16) },
        Trial { family: Family::HiddenKeys, ..trial(SMALL, "b1h1s20/33d384:mask=b", F16) },
    ]);
}

/// f32 by three MMAs of tf32, held to the error bound of f32 arithmetic: small and large head dimensions, every mask, modifiers,
/// lengths, pages. Infinities have no parts: scores that meet one are computed in another way.
#[test]
fn ampere_f32_is_as_precise_as_f32() {
    const SMALL: &str = "ampere_f32[BLOCK_M=32 BLOCK_N=32 WARPS_M=2 WARPS_N=2]";
    const TALL: &str = "ampere_f32[BLOCK_M=128 BLOCK_N=32 WARPS_M=4 STAGES=2]";
    let mut trials = vec![
        trial(SMALL, "b1h2/1s40/70d64:causal-br", F32),
        trial(TALL, "b1h1s70/140d64:causal", F32),
        trial("ampere_f32[BLOCK_N=64]", "b1h2s20/90d40:window=20/3:sinks", F32),
        trial(SMALL, "b1h1s20/40d256", F32),
        trial(SMALL, "b1h1s9/40d1", F32),
        trial(SMALL, "b2h1s9/40d8/3:causal-br:softcap=5", F32),
        trial(SMALL, "b2h2s20/35d24/100:alibi:bias=bh:mask=b:chunk=16", F32),
        Trial { blocks: 2, ..trial(SMALL, "b5h2/1s40/70d32:causal-br:varlen", F32) },
        Trial { seed: 5, ..trial(SMALL, "b3h2s9/70d64:used:leftpad:indexed:paged=7", F32) },
        trial(SMALL, "b3h2s40/30d32:causal-br:used-q:precise", F32),
    ];
    let families = Family::adversarial().into_iter();
    trials.extend(families.map(|family| Trial { family, ..trial(SMALL, "b1h2s20/40d32:causal", F32) }));
    run_all(&trials);
}

/// A key of minus infinity has weight zero where its score is, whatever its neighbours hold.
#[test]
fn infinite_keys_of_f32_follow_ieee() {
    let kernel = "ampere_f32[BLOCK_M=32 BLOCK_N=32 WARPS_M=2 WARPS_N=2]";
    let (spec, case) = case_of(&trial(kernel, "b1h1s4/40d16", F32));
    let mut inputs = case.inputs.clone();
    inputs.q.view_mut().elements_mut::<f32>().unwrap().fill(1.0);
    inputs.k.view_mut().elements_mut::<f32>().unwrap()[5 * 16 + 3] = f32::NEG_INFINITY;
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let (output, outcome) =
        sim.simulation(kernel, &spec.problem).unwrap().run(&inputs, &Options::default()).unwrap();
    let tensors = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| tensor.view());
    let want = solve(&Question::new(&spec.problem, tensors, &SideInputs::default()).unwrap());
    let mut values = Vec::new();
    output.o.view().row_f64(0, 0, 2, &mut values);
    assert!(outcome.findings.is_empty());
    for (got, want) in values.iter().zip(&want.o[2 * 16..]) {
        assert!((got - want).abs() < 1e-5, "{got} instead of {want}");
    }
}

/// The same modifiers in the consumers of hopper_fwd: whole tiles, cut ones, several Q tiles for a CTA, packed heads, wide heads.
#[test]
fn hopper_fwd_changes_scores() {
    run_all(&[
        trial("hopper_fwd", "b1h1s70/128d64:softcap=30", F16),
        trial("hopper_fwd", "b1h2s130d64:causal:softcap=0.5", BF16),
        trial("hopper_fwd", "b1h4/2s30/90d64:causal-br:alibi", BF16),
        trial("hopper_fwd", "b1h2s70/20d64:causal-br:sinks", F16),
        trial("hopper_fwd", "b1h1s130/70d128:window=20/0:sinks", BF16),
        trial("hopper_fwd", "b2h2/1s20/40d64:bias=bh", BF16),
        trial("hopper_fwd", "b2h1s66/130d64:causal:bias=k", F16),
        trial("hopper_fwd", "b1h2s20/128d64:mask=h", BF16),
        trial("hopper_fwd", "b1h1s80/300d64:causal-br:chunk=100", F16),
        trial("hopper_fwd", "b1h1s70/40d64:causal-br:chunk=8", BF16),
        Trial {
            blocks: 1,
            ..trial(
                "hopper_fwd",
                "b1h2s70/136d64:window=90/9:softcap=5:alibi:bias:mask=h:chunk=64:sinks",
                F16,
            )
        },
        trial("hopper_fwd", "b1h1s20/70d256:alibi", BF16),
        Trial { family: Family::HiddenKeys, ..trial("hopper_fwd", "b2h1s20/40d64:mask=b", F16) },
    ]);
}

/// Rows of so many keys that their P is rounded once: a cap without a maximum, where scores reach it and values are as large as they can
/// be, and one so large that the maximum stays; slopes on both sides of the diagonal; a bias and a mask that are read ahead.
#[test]
fn hopper_fwd_changes_scores_of_many_keys() {
    run_all(&[
        trial("hopper_fwd", "b1h1s70/1030d64:softcap=5", BF16),
        trial("hopper_fwd", "b1h1s64/1024d128:softcap=2", BF16),
        trial("hopper_fwd", "b1h1s300d64:causal:softcap=50:sinks", BF16),
        trial("hopper_fwd", "b1h1s64/300d128:softcap=30", BF16),
        // rows of any maximum and of few keys, beside caps whose weights say what is precise
        trial("hopper_fwd", "b1h1s64/700d64:softcap=4", BF16),
        Trial { family: Family::Uniform, ..trial("hopper_fwd", "b1h1s600d64:causal:softcap=50", BF16) },
        Trial {
            family: Family::OneHot,
            ..trial("hopper_fwd", "b1h1s64/900d64:window=700/0:softcap=30", BF16)
        },
        Trial { family: Family::LargeLogits, ..trial("hopper_fwd", "b1h1s64/1024d64:softcap=5", BF16) },
        Trial { family: Family::MaxValues, ..trial("hopper_fwd", "b1h1s64/1024d64:softcap=5", BF16) },
        trial("hopper_fwd", "b1h2s200/256d64:alibi", BF16),
        trial("hopper_fwd", "b1h2s150d64:causal:alibi", F16),
        // near tiles, far ones, and steep heads whose farther tiles are skipped
        trial("hopper_fwd", "b1h4s600d64:causal:alibi", BF16),
        Trial { blocks: 1, ..trial("hopper_fwd", "b1h4s64/1000d128:causal-br:alibi:sinks", BF16) },
        // rows whose nearest key is far
        trial("hopper_fwd", "b1h4s500/300d64:causal:alibi", BF16),
        trial("hopper_fwd", "b1h1s64/1024d64:bias=h", BF16),
        trial("hopper_fwd", "b1h1s40/256d128:bias=bh", F16),
        trial("hopper_fwd", "b1h1s70/1024d64:mask=b", BF16),
        trial("hopper_fwd", "b1h1s40/302d128:causal-br:mask=bh", F16),
    ]);
}

/// Lengths that are data: of tiles in which a sequence ends, the values behind its last key are another's, often NaN; rows behind its last
/// query are not to be written, by TMA or otherwise. Heads of a group share Q tiles.
#[test]
fn hopper_fwd_reads_lengths_on_the_device() {
    run_all(&[
        trial("hopper_fwd", "b4h2/1s150/140d64:varlen", F16),
        Trial { seed: 2, ..trial("hopper_fwd", "b4h2s40/300d64:causal-br:varlen", BF16) },
        Trial { seed: 3, ..trial("hopper_fwd", "b4h1s150d64:causal-br:varlen", F16) },
        Trial { seed: 4, ..trial("hopper_fwd", "b3h1s40/200d128:window=60/9:varlen", BF16) },
        trial("hopper_fwd", "b3h2s20/300d64:causal:varlen=kv", F16),
        trial("hopper_fwd", "b3h1s140/70d64:varlen=q", BF16),
        trial("hopper_fwd", "b3h8/2s1/300d64:used", BF16),
        trial("hopper_fwd", "b3h2s20/70d256:causal-br:varlen:used", F16),
        // each CTA takes many Q tiles, and every ring goes round
        Trial { blocks: 1, ..trial("hopper_fwd", "b5h2s140/300d64:causal-br:varlen", BF16) },
        Trial { blocks: 2, ..trial("hopper_fwd", "b40h1s20d64:causal-br:varlen", F16) },
        Trial { blocks: 2, seed: 2, ..trial("hopper_fwd", "b5h8/2s70d64:causal-br:varlen", BF16) },
        // one slot for queries, which wait until O has been stored; heads one after the other
        Trial { blocks: 1, ..trial("hopper_fwd[LONGEST_FIRST=0]", "b3h2s40d144:causal-br:varlen", F16) },
        trial(
            "hopper_fwd",
            "b3h2s20/70d64:causal-br:varlen:softcap=9:alibi:bias=bh:mask=b:chunk=16:sinks",
            F16,
        ),
    ]);
}

/// Pages smaller than a KV tile, as large as one and larger, in every order.
#[test]
fn hopper_fwd_gathers_pages() {
    run_all(&[
        trial("hopper_fwd", "b3h4/2s9/300d64:causal-br:used:paged=16", BF16),
        Trial { seed: 5, ..trial("hopper_fwd", "b2h1s9/70d64:paged=1", F16) },
        Trial { seed: 9, ..trial("hopper_fwd", "b2h2s9/150d64:used:paged=7", BF16) },
        Trial { seed: 13, ..trial("hopper_fwd[BLOCK_N=64]", "b2h1s9/300d64:used:paged=128", F16) },
        Trial { seed: 5, ..trial("hopper_fwd", "b3h1s70/300d64:causal-br:varlen=q:used:paged=256", BF16) },
        Trial { blocks: 1, seed: 9, ..trial("hopper_fwd", "b3h2/1s20/200d128:used:paged=64", F16) },
        // boxes that are a page, and several to a page; tiles that begin inside a page
        Trial {
            blocks: 1,
            seed: 2,
            ..trial("hopper_fwd", "b3h1s70/300d64:causal-br:varlen=q:used:paged=32", F16)
        },
        Trial { seed: 3, ..trial("hopper_fwd", "b2h2s9/300d64:used:paged=48", BF16) },
        Trial {
            blocks: 1,
            seed: 6,
            ..trial("hopper_fwd[BLOCK_N=80]", "b2h1s9/300d256:used:paged=256", BF16)
        },
    ]);
}

/// Paddings move tiles off the edges of pages; blocks and rows of the table are looked up; queries end before their room does.
#[test]
fn hopper_fwd_finds_each_sequences_place() {
    run_all(&[
        trial("hopper_fwd", "b3h2s140/40d64:causal-br:used-q", F16),
        trial("hopper_fwd", "b3h1s40/200d128:window=60/9:varlen:used:used-q", BF16),
        Trial { seed: 2, ..trial("hopper_fwd", "b3h8/2s1/300d64:leftpad", BF16) },
        Trial { seed: 3, ..trial("hopper_fwd", "b3h2s20/300d64:causal-br:used:leftpad:indexed", F16) },
        Trial { seed: 5, ..trial("hopper_fwd[BLOCK_N=64]", "b3h1s9/300d64:used:leftpad:paged=128", F16) },
        trial("hopper_fwd", "b3h2/1s9/150d64:causal-br:used:used-q:leftpad:indexed:paged=16", BF16),
        // sequences in boxes and sequences off their edges, one after the other
        Trial { blocks: 1, seed: 4, ..trial("hopper_fwd", "b6h1s9/270d64:used:leftpad:paged=16", F16) },
        Trial { blocks: 1, seed: 9, ..trial("hopper_fwd", "b4h2/1s20/200d128:used:indexed:paged=64", F16) },
    ]);
}

/// Code that does not know a kind gives an answer that the gate refuses, or breaks a rule that the simulator watches.
#[test]
fn code_without_a_kind_is_found_out() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for kernel in ["ampere_fwd", "hopper_fwd"] {
        let plain = sim.simulation(kernel, &case_of(&trial("", "b2h2s20/70d64", F16)).0.problem).unwrap();
        for kind in [
            "softcap=3",
            "alibi",
            "bias",
            "mask=b",
            "chunk=16",
            "sinks",
            "used",
            "varlen",
            "paged=16",
            "leftpad",
            "indexed",
        ] {
            let shape: &'static str = format!("b2h2s20/70d64:{kind}").leak();
            let (spec, case) = case_of(&trial(kernel, shape, F16));
            let simulation = sim.simulation(kernel, &spec.problem).unwrap();
            let right = simulation.run(&case.inputs, &Options::default()).unwrap();
            assert!(right.1.is_clean() && case.judge(&right.0.o.view(), None).passed(), "{kernel} {kind}");
            let refused = match simulation.run_module(plain.module(), &case.inputs, &Options::default()) {
                Ok((output, outcome)) => !outcome.is_clean() || !case.judge(&output.o.view(), None).passed(),
                Err(_) => true,
            };
            assert!(refused, "{kernel} {kind}");
        }
    }
}

/// What a kernel's manifest says it takes is tried here, and nothing else is claimed.
#[test]
fn every_claimed_feature_is_tried() {
    let registry = Registry::embedded().unwrap();
    let takes = |kernel: &str| -> Vec<Feature> {
        let kernel = registry.kernel(kernel).unwrap();
        Feature::ALL.into_iter().filter(|feature| kernel.features().contains(*feature)).collect()
    };
    use Feature::*;
    let all = [
        PackedQueries,
        PackedKeys,
        UsedLengths,
        UsedQueries,
        LeftPadding,
        CacheIndices,
        PagedCache,
        Softcap,
        Alibi,
        Bias,
        BooleanMask,
        Chunks,
        Sinks,
        HighPrecision,
    ];
    let and_blocks: Vec<Feature> =
        Feature::ALL.into_iter().filter(|feature| all.contains(feature) || *feature == BlockMask).collect();
    assert_eq!(takes("ampere_fwd"), and_blocks);
    assert_eq!(takes("ampere_f32"), and_blocks);
    assert_eq!(takes("hopper_fwd"), and_blocks);
    // Their own tests are in decode.rs.
    let codes = [KvType, TensorScales, TokenScales, BatchInvariant];
    let more: Vec<Feature> =
        Feature::ALL.into_iter().filter(|feature| all.contains(feature) || codes.contains(feature)).collect();
    assert_eq!(takes("flash_decode"), more);
    assert_eq!(takes("sdpa_v1"), []);
}

/// A scale of 0 gives every visible key the same weight, and hidden ones none.
#[test]
fn a_scale_of_zero_is_a_mean() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for (kernel, shape, dtype) in [
        ("ampere_fwd", "b1h2s20/70d64:causal-br", F16),
        ("ampere_fwd[BLOCK_M=32 WARPS_M=2 WARPS_N=2]", "b1h2s20/70d64:softcap=5:alibi:mask", BF16),
        ("hopper_fwd", "b1h1s70/128d64", F16),
        ("hopper_fwd", "b2h2s40/100d64:causal-br:varlen", BF16),
        ("hopper_small", "b1h1s40/200d64:causal", F16),
        ("hopper_small", "b1h4/1s1/300d64", BF16),
        ("hopper_wide", "b1h1s70/100d64:causal", BF16),
        ("flash_decode", "b2h4/2s2/170d64:causal-br:used:paged=16", BF16),
        ("flash_decode", "b2h4/2s1/90d64:kv=e4m3", F16),
        ("sdpa_v1", "b1h1s20/33d64:causal", F16),
        ("sdpa_v2b", "b1h1s20/33d64:causal", F16),
        ("sdpa_v2c", "b1h1s20/33d64:causal", F16),
    ] {
        let mut spec = case_of(&trial(kernel, shape, dtype)).0;
        spec.problem = spec.problem.with_scale(0.0).unwrap();
        let case = spec.build();
        let simulation = sim.simulation(kernel, &spec.problem).unwrap();
        let (output, outcome) = simulation.run(&case.inputs, &Options::default()).unwrap();
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        assert!(
            judgement.passed() && outcome.findings.is_empty(),
            "{kernel} {shape}: {}",
            judgement.summary()
        );
    }
}

/// Models fill rows with the lowest number there is: such a row is a mean of the values. Infinities hide.
#[test]
fn rows_full_of_one_bias() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let mut wrong = Vec::new();
    for (kernel, shape, dtype) in [
        ("ampere_fwd", "b1h1s20/130d64:bias", BF16),
        ("ampere_fwd", "b1h1s3/300d40:bias", F16),
        ("hopper_fwd", "b1h1s20/130d64:bias", BF16),
        ("hopper_fwd", "b1h1s3/300d128:bias", F16),
        ("hopper_fwd", "b1h1s1/300d40:bias", BF16),
    ] {
        let (spec, case) = case_of(&trial(kernel, shape, dtype));
        let (problem, mut inputs) = (spec.problem, case.inputs.clone());
        let [_, _, queries, keys] = inputs.side.bias.as_ref().unwrap().view().shape();
        let simulation = sim.simulation(kernel, &problem).unwrap();
        let mut values = Vec::new();
        let mut mean = 0.0;
        for key in 0..keys {
            inputs.v.view().row_f64(0, 0, key, &mut values);
            mean += values[0] / keys as f64;
        }
        for (all, wanted) in [(f32::MIN, mean), (-1e38, mean), (f32::NEG_INFINITY, 0.0)] {
            let mut bias = Tensor::zeros([1, 1, queries, keys], DType::F32, Layout::Bhsd);
            bias.view_mut().elements_mut::<f32>().unwrap()[(queries - 1) * keys..].fill(all);
            inputs.side.bias = Some(bias);
            let (output, outcome) = simulation.run(&inputs, &Options::default()).unwrap();
            output.o.view().row_f64(0, 0, queries - 1, &mut values);
            if !((values[0] - wanted).abs() < 2e-3 && outcome.findings.is_empty()) {
                wrong.push(format!("{kernel} {shape} {all}: {} instead of {wanted}", values[0]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
