//! Rows of `hopper_fwd` that are weighed without a maximum, on the simulator: what comes late and large, what overflows, and what the gate
//! says of code that lets it.

mod trials;

use evosdpa_kernels::Registry;
use evosdpa_lab::device::Sim;
use evosdpa_oracle::inputs::Family;
use trials::{BF16, F16, Trial, run, run_all, trial};

/// Two warpgroups, asked after 128 keys.
const TWO: &str = "hopper_fwd[BLOCK_N=128 CONSUMERS=2 CTAS_PER_SM=1 SETTLE_KEYS=128]";
/// Three of them, and tiles of 112 keys.
const THREE: &str = "hopper_fwd[BLOCK_N=112 CONSUMERS=3 CTAS_PER_SM=1 Q_IN_REGS=0 SETTLE_KEYS=256]";

/// The first key, which comes last, is a hundred times as large: all of some rows, whose weights overflow, and nothing of others.
#[test]
fn what_comes_late_and_large_is_seen() {
    let late = |kernel, shape, dtype| Trial { family: Family::FirstKey, ..trial(kernel, shape, dtype) };
    run_all(&[
        late(TWO, "b1h2s200/700d128:causal-br", BF16),
        late(TWO, "b1h4/2s150/641d64", F16),
        late(TWO, "b1h2s130/900d72:window=600/0:sinks", BF16),
        late(THREE, "b1h2s200/900d72:causal-br", BF16),
        late("hopper_fwd[SCALE_LATE=0 SETTLE_KEYS=128]", "b1h2s130/700d128:causal-br", F16),
        Trial { family: Family::LargeLogits, ..trial(TWO, "b1h2s130/900d128", F16) },
        Trial { family: Family::OneHot, ..trial(THREE, "b1h2s200/900d64", BF16) },
        trial(THREE, "b1h2s200/900d80", F16),
    ]);
}

/// Rows that are computed again find their tokens: packed, filled in part, padded, in another sequence's block.
#[test]
fn lengths_that_are_data_settle_too() {
    let late = |shape, dtype| Trial { family: Family::FirstKey, ..trial(TWO, shape, dtype) };
    run_all(&[
        late("b3h4/2s700d64:causal-br:varlen", BF16),
        late("b2h2s300/900d96:varlen", F16),
        late("b2h4/2s130/900d128:causal-br:used:leftpad", BF16),
        late("b2h2s130/800d64:causal-br:used:indexed", F16),
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
    let kernel = "keeps_overflow[BLOCK_N=128 CONSUMERS=2 CTAS_PER_SM=1 SETTLE_KEYS=128]";
    let first = Trial { family: Family::FirstKey, ..trial(kernel, "b1h2s200/700d128:causal-br", BF16) };
    let wrong = run(&sim, 0, &first);
    assert!(wrong.iter().any(|what| what.contains("past the tolerance")), "{wrong:?}");
    // Where nothing overflows the two are one.
    assert_eq!(run(&sim, 0, &Trial { family: Family::Normal, ..first }), [""; 0]);
}
