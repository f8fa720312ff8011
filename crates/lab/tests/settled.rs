//! Rows of `hopper_fwd` that are weighed without a maximum, on the simulator: what comes late and large, what overflows, and what the gate
//! says of code that lets it.

mod trials;

use evosdpa_core::Tensor;
use evosdpa_kernels::Registry;
use evosdpa_lab::device::Sim;
use evosdpa_oracle::{Question, elements, inputs::Family, solve};
use ptxsan::Options;
use trials::{BF16, F16, Trial, case_of, run, run_all, trial};

/// Two warpgroups.
const TWO: &str = "hopper_fwd[BLOCK_N=128 CONSUMERS=2 CTAS_PER_SM=1 SETTLE_KEYS=512]";
/// Three of them, and tiles of 112 keys.
const THREE: &str = "hopper_fwd[BLOCK_N=112 CONSUMERS=3 CTAS_PER_SM=1 Q_IN_REGS=0 SETTLE_KEYS=512]";

/// The first key, which comes last, is a hundred times as large: all of some rows, whose weights overflow, and nothing of others.
#[test]
fn what_comes_late_and_large_is_seen() {
    let late = |kernel, shape, dtype| Trial { family: Family::FirstKey, ..trial(kernel, shape, dtype) };
    run_all(&[
        late(TWO, "b1h2s200/1000d128:causal-br", BF16),
        late(TWO, "b1h4/2s150/901d64", F16),
        late(TWO, "b1h2s130/1200d72:window=900/0:sinks", BF16),
        late(THREE, "b1h2s200/1000d72:causal-br", BF16),
        late("hopper_fwd[SCALE_LATE=0 SETTLE_KEYS=512]", "b1h2s130/800d128:causal-br", F16),
        Trial { family: Family::LargeLogits, ..trial(TWO, "b1h2s130/900d128", F16) },
        Trial { family: Family::OneHot, ..trial(THREE, "b1h2s200/900d64", BF16) },
        trial(THREE, "b1h2s200/900d80", F16),
    ]);
}

/// The first key, which comes last, holds a tenth to a sixth of each row, and less than a thread has seen of it. Rounded to bf16 as other
/// weights are, it would move O by up to 2.6e-3.
#[test]
fn what_holds_much_of_a_row_is_not_rounded() {
    let (spec, case) = case_of(&trial(TWO, "b1h1s128/1280d64", BF16));
    let mut inputs = case.inputs.clone();
    let change = |tensor: &mut Tensor, given: &Tensor, change: &(dyn Fn(usize, &mut [f64]) + Sync)| {
        elements::fill_rows(tensor, |[b, h, row], out| {
            let mut values = Vec::new();
            given.view().row_f64(b, h, row, &mut values);
            change(row, &mut values);
            out.copy_from_slice(&values);
        });
    };
    // The first column is that key's alone, so that a query's first element is its score.
    change(&mut inputs.q, &case.inputs.q, &|row, values| values[0] = 5.5 + row as f64 / 200.0);
    change(&mut inputs.k, &case.inputs.k, &|key, values| {
        if key == 0 {
            values.fill(0.0);
        }
        values[0] = if key == 0 { 8.0 } else { 0.0 };
    });
    // About 0 in the end, where the output's own rounding is small.
    change(&mut inputs.v, &case.inputs.v, &|key, values| match key {
        0 => values.fill(4.0),
        _ => values.iter_mut().for_each(|x| *x -= 0.6),
    });
    let tensors = [&inputs.q, &inputs.k, &inputs.v].map(Tensor::view);
    let right = solve(&Question::new(&spec.problem, tensors, &inputs.side()).unwrap());
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let simulation = sim.simulation(TWO, &spec.problem).unwrap();
    let (output, outcome) = simulation.run(&inputs, &Options::default()).unwrap();
    assert!(outcome.findings.is_empty(), "{:?}", outcome.findings);
    let (mut row, mut worst) = (Vec::new(), 0.0f64);
    for query in 0..128 {
        output.o.view().row_f64(0, 0, query, &mut row);
        for (got, want) in row.iter().zip(&right.o[query * 64..]) {
            let tolerance = 1e-3 + spec.problem.output_float().rounding_error(*want);
            worst = worst.max((got - want).abs() / tolerance);
        }
    }
    assert!(worst < 1.0, "{worst} of the tolerance");
}

/// Rows that are computed again find their tokens: packed, filled in part, padded, in another sequence's block.
#[test]
fn lengths_that_are_data_settle_too() {
    let late = |shape, dtype| Trial { family: Family::FirstKey, ..trial(TWO, shape, dtype) };
    run_all(&[
        late("b2h4/2s1000d64:causal-br:varlen", BF16),
        late("b2h2s300/1100d96:varlen", F16),
        late("b2h4/2s130/1200d128:causal-br:used:leftpad", BF16),
        late("b2h2s130/1100d64:causal-br:used:indexed", F16),
    ]);
}

/// Weights that overflow leave no number; left alone, that is what the gate sees.
#[test]
fn what_overflowed_must_be_computed_again() {
    let mut registry = Registry::embedded().unwrap();
    let source = registry.kernel("hopper_fwd").unwrap().source.to_string();
    let changed = source.replace("consumer.overflowed()", "false");
    assert_ne!(source, changed);
    registry.register_source("hopper_fwd", "keeps_overflow", &changed).unwrap();
    let sim = Sim::open(registry).unwrap();
    let kernel = "keeps_overflow[BLOCK_N=128 CONSUMERS=2 CTAS_PER_SM=1 SETTLE_KEYS=512]";
    let first = Trial { family: Family::FirstKey, ..trial(kernel, "b1h2s200/1000d128:causal-br", BF16) };
    let wrong = run(&sim, 0, &first);
    assert!(wrong.iter().any(|what| what.contains("past the tolerance")), "{wrong:?}");
    // Where nothing overflows the two are one.
    assert_eq!(run(&sim, 0, &Trial { family: Family::Normal, ..first }), [""; 0]);
}
