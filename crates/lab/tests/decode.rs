//! flash_decode on the simulator: shares of any size, parts merged by whoever comes last, every kind of cache.

mod trials;

use evosdpa_core::DType;
use evosdpa_kernels::{Arch, Registry};
use evosdpa_lab::device::Sim;
use evosdpa_oracle::inputs::Family;
use ptxsan::Options;
use trials::{BF16, F16, Trial, case_of, run, run_all, trial};

const DECODE: &str = "flash_decode";

/// On at most so many CTAs.
const fn on(blocks: u32, shape: &'static str, dtype: DType) -> Trial {
    Trial { blocks, ..trial(DECODE, shape, dtype) }
}

/// Head dimensions, groups, masks; one CTA for everything, a few whose shares end anywhere, and as many as there are KV tiles.
#[test]
fn shares_of_any_size() {
    run_all(&[
        trial(DECODE, "b1h4/1s1/300d128", BF16),
        on(1, "b2h4/2s1/130d64", F16),
        on(3, "b2h4/2s1/200d64", BF16),
        on(5, "b3h2s3/150d40:causal-br", F16),
        on(7, "b1h3/1s16/200d72/48:window=100/0", BF16),
        on(2, "b1h16/1s4/90d64:causal-br", F16),
        trial(DECODE, "b1h8/1s3/70d256", BF16),
        on(2, "b2h3s1/1d7", F16),
        on(3, "b1h2s9/4d64:causal-br", BF16),
        Trial { family: Family::LargeLogits, ..on(3, "b1h8/2s1/260d64", F16) },
        Trial { family: Family::HiddenKeys, ..on(3, "b2h2s2/133d64:mask=b", F16) },
    ]);
}

/// Lengths that are data, pages of several sizes in every order, modifiers.
#[test]
fn caches_of_every_kind() {
    run_all(&[
        on(5, "b3h4/2s2/170d64:causal-br:used:paged=16", BF16),
        Trial { seed: 5, ..on(5, "b3h2s2/133d64:used:paged=1", F16) },
        Trial { seed: 9, ..on(2, "b2h2s1/300d64:used:paged=256", BF16) },
        Trial { seed: 2, ..on(3, "b5h2/1s4/100d64:varlen", F16) },
        on(5, "b40h1s2/30d32:causal-br:varlen", BF16),
        Trial { seed: 3, ..on(3, "b4h4/1s1/200d64:used", BF16) },
        Trial { seed: 2, ..on(4, "b3h4/2s3/90d64:causal-br:used:used-q:leftpad:indexed", F16) },
        Trial { seed: 5, ..on(4, "b3h2s2/90d64:used:leftpad:indexed:paged=16", BF16) },
        on(3, "b2h2s2/70d64:window=30/9:softcap=5:alibi:bias=b:mask:chunk=32:sinks", F16),
        on(3, "b3h2s3/70d64:causal-br:varlen:softcap=9:alibi:bias=bh:mask=b:chunk=16:sinks", BF16),
    ]);
}

/// Clusters: with fewer KV tiles than CTAs, with rows for some of them, with Q tiles that are not there.
#[test]
fn clusters_send_their_parts() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap().preferring(Arch::Sm90a);
    for (index, trial) in [
        trial("flash_decode[CLUSTER=8 WARPS_N=4]", "b2h8/2s2/300d64:used:paged=16", BF16),
        trial("flash_decode[CLUSTER=4 WARPS_N=2]", "b3h6/2s3/200d64:causal-br:varlen", F16),
        Trial {
            seed: 3,
            ..trial("flash_decode[CLUSTER=8 WARPS_N=2]", "b3h2s7/90d64:used:used-q:leftpad", F16)
        },
        trial("flash_decode[CLUSTER=2 WARPS_N=2]", "b2h20/2s1/260d128:used:kv=e4m3", BF16),
    ]
    .iter()
    .enumerate()
    {
        let wrong = run(&sim, index, trial);
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

/// Codes with scales of every reach, under both types of queries, with pages and without.
#[test]
fn caches_of_codes() {
    run_all(&[
        on(3, "b2h4/2s1/130d64:kv=e4m3", BF16),
        on(3, "b2h4/2s2/130d128:kv=e4m3:scales=token", BF16),
        on(2, "b2h4/2s1/70d64:kv=u8:scales=tensor", F16),
        on(2, "b1h2s1/70d20:kv=u8:scales=token", BF16),
        on(5, "b2h4/2s1/200d64:used:paged=7:kv=e4m3:scales=token", BF16),
        Trial { seed: 2, ..on(3, "b3h2/1s3/90d64:causal-br:varlen:kv=e4m3:scales=token", F16) },
        on(2, "b1h4/1s1/40d256:used:paged=16:kv=e4m3", F16),
        on(3, "b1h4/2s1/300d64:used:paged=16:kv=i8", BF16),
        on(2, "b1h2s1/70d20:kv=i8:scales=token", F16),
        on(3, "b2h4/2s20/130d128:causal-br:kv=i8:scales=tensor", BF16),
        Trial { seed: 2, ..on(3, "b3h2/1s3/90d64:causal-br:varlen=q:used:paged=7:kv=i8:scales=token", BF16) },
    ]);
    // Before sm_89 there is no instruction for e4m3.
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap().preferring(Arch::Sm80);
    let wrong = run(&sim, 0, &on(2, "b1h4/1s1/70d32:kv=e4m3:scales=token", BF16));
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Each of the 256 integer codes in K and in V, -128 of i8 included: with one key a head, the score is what the key's code stands for, and O
/// what the value's does.
#[test]
fn every_integer_code_is_read_as_its_value() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for codes in [DType::U8, DType::I8] {
        let shape: &'static str = format!("b1h256s1/1d16/32:kv={codes}:scales=tensor").leak();
        let (spec, mut case) = case_of(&trial(DECODE, shape, F16));
        let inputs = &mut case.inputs;
        let [q_head, k_head, v_head] = [&inputs.q, &inputs.k, &inputs.v].map(|x| x.view().strides()[1]);
        // The first of all dimensions counts alone: one, and the head's code.
        inputs.q.bytes_mut().chunks_mut(2 * q_head).for_each(|q| {
            q.fill(0);
            q[1] = 0x3C;
        });
        inputs.k.bytes_mut().fill(if codes == DType::U8 { 128 } else { 0 });
        for head in 0..256 {
            inputs.k.bytes_mut()[head * k_head] = head as u8;
            let values = &mut inputs.v.bytes_mut()[head * v_head..][..32];
            values.iter_mut().enumerate().for_each(|(dim, value)| *value = (head + 8 * dim) as u8);
        }
        let scales = inputs.scales.as_mut().unwrap();
        (scales.k, scales.v) = (vec![0.125], vec![2.0]);
        let simulation = sim.simulation(DECODE, &spec.problem).unwrap();
        let (output, outcome) = simulation.run(&case.inputs, &Options::default()).unwrap();
        assert!(outcome.is_clean(), "{codes}");
        let lse = output.lse.unwrap();
        let is = |got: f64, wanted: f64| (got - wanted).abs() <= 1e-3 * wanted.abs();
        let (mut key, mut values, mut got) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..256 {
            case.inputs.k.view().row_f64(0, head, 0, &mut key);
            case.inputs.v.view().row_f64(0, head, 0, &mut values);
            output.o.view().row_f64(0, head, 0, &mut got);
            assert!(is(f64::from(lse[head]), key[0] * 0.125 / 4.0), "{codes} {head}: {}", lse[head]);
            for (got, value) in got.iter().zip(&values) {
                assert!(is(*got, 2.0 * value), "{codes} {head}: {got} for {value}");
            }
        }
    }
}

/// Batch-invariant results are the same bits alone, beside another sequence and on any number of CTAs; equal shares are not.
#[test]
fn what_a_sequence_gets_does_not_depend_on_the_others() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let (_, beside) = case_of(&trial(DECODE, "b2h2/1s1/2200d32", F16));
    let first_sequence = |suffix: &str| {
        [(2, 3), (1, 1), (1, 5)].map(|(batch, blocks)| {
            let shape: &'static str = format!("b{batch}h2/1s1/2200d32{suffix}").leak();
            let (spec, mut case) = case_of(&trial(DECODE, shape, F16));
            let tensors = [&mut case.inputs.q, &mut case.inputs.k, &mut case.inputs.v];
            for (own, both) in tensors.into_iter().zip([&beside.inputs.q, &beside.inputs.k, &beside.inputs.v])
            {
                let bytes = own.bytes().len();
                own.bytes_mut().copy_from_slice(&both.bytes()[..bytes]);
            }
            let simulation = sim.simulation(DECODE, &spec.problem).unwrap().on_blocks(blocks);
            let (output, outcome) = simulation.run(&case.inputs, &Options::default()).unwrap();
            assert!(outcome.is_clean(), "{shape} on {blocks}");
            output.o.bytes()[..2 * 32 * 2].to_vec()
        })
    };
    let [beside, alone, on_many] = first_sequence(":invariant");
    assert!(beside == alone && alone == on_many);
    let [beside, alone, on_many] = first_sequence("");
    assert!(beside != alone && alone != on_many, "the comparison sees no difference");
}

/// Splits of few and of many keys are right, also where they are doubled because there would be more than 32.
#[test]
fn fixed_splits() {
    run_all(&[
        on(3, "b2h3s1/1300d32:used:invariant", BF16),
        Trial { seed: 3, ..on(4, "b3h4/2s3/1200d32:causal-br:used:paged=16:invariant", F16) },
        Trial { kernel: "flash_decode[SPLIT_KEYS=256]", ..on(5, "b1h1s1/9000d16", F16) },
    ]);
}

/// Without a workspace nothing is split, which is right as well.
#[test]
fn without_a_workspace() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let (spec, case) = case_of(&trial(DECODE, "b2h4/2s1/200d64:used", BF16));
    let simulation = sim.simulation(DECODE, &spec.problem).unwrap().on_blocks(3).without_workspace();
    let (output, outcome) = simulation.run(&case.inputs, &Options::default()).unwrap();
    assert!(outcome.is_clean() && case.judge(&output.o.view(), None).passed());
}

/// Code that reads scales of another reach, other codes, or no pages gives an answer that the gate refuses.
#[test]
fn code_of_another_cache_is_found_out() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let of = |shape: &str| {
        sim.simulation(DECODE, &case_of(&trial("", shape.to_owned().leak(), F16)).0.problem).unwrap()
    };
    for (kind, other) in [
        (":kv=e4m3", ":kv=e4m3:scales=tensor"),
        (":kv=e4m3:scales=token", ":kv=e4m3"),
        (":kv=u8", ":kv=e4m3"),
        (":kv=i8", ":kv=u8"),
        (":kv=i8:scales=token", ":kv=i8"),
        (":kv=e4m3", ""),
        (":used:paged=16", ":used"),
        (":used", ""),
    ] {
        let shape: &'static str = format!("b2h4/2s1/90d64{kind}").leak();
        let (_, case) = case_of(&trial(DECODE, shape, F16));
        let wrong = of(&format!("b2h4/2s1/90d64{other}"));
        let refused = match of(shape).run_module(wrong.module(), &case.inputs, &Options::default()) {
            Ok((output, outcome)) => !outcome.is_clean() || !case.judge(&output.o.view(), None).passed(),
            Err(_) => true,
        };
        assert!(refused, "{kind} by code for {other:?}");
    }
}
