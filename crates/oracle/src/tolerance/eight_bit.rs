//! The rules of 8-bit kernels.
//!
//! - **dequantised**: the kernel's own error. Against the oracle on the values that the codes stand for, every element
//!   closer than 1e-2 and ‖O − ref‖/‖ref‖ below 1e-2. In bf16 half a unit in the last place of the element comes on top: above 2
//!   it is 1e-2 nearly by itself.
//! - **end-to-end**: what a user sees. Against the oracle on the inputs before quantisation: max ≤ 0.06, mean ≤ 0.02, at
//!   most 1 % of elements over 0.06.
//!
//! The absolute limits are stated for V ~ N(0, 1) and grow with V's size. Some inputs lose more than the end-to-end limits
//! in quantisation alone: rows that see one key of V in e4m3, or scores so large that a step of a code moves the weights.
//! There the exact answer to the quantised inputs breaks the rule, so every right kernel would; the rule then says that it
//! does not apply, with that answer's numbers, and the dequantised rule stands alone.

use super::{
    Errors, Judgement, Rule, Standard, Tally, Truth, distance::Distances, finite_rule, judge_lse, over_rows,
};
use evosdpa_core::{Float, Problem, TensorView};

use crate::reference::Reference;

/// Limit of the kernel's own error, absolute (for V ~ N(0, 1)) and relative alike. It must be kept below, not at.
pub const DEQUANTISED: f64 = 1e-2;

/// Errors against the answer to the inputs before quantisation, or limits of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EndToEnd {
    /// Largest absolute error.
    pub max: f64,
    /// Mean absolute error.
    pub mean: f64,
    /// Percent of elements whose error is over [`END_TO_END`]'s `max`.
    pub percent_over: f64,
}

/// What an 8-bit kernel may be away from the answer to the unquantised inputs, for V ~ N(0, 1).
pub const END_TO_END: EndToEnd = EndToEnd { max: 0.06, mean: 0.02, percent_over: 1.0 };

impl EndToEnd {
    fn new(distances: &Distances) -> Self {
        let errors = distances.errors();
        Self { max: errors.max, mean: errors.mean, percent_over: errors.percent_bad }
    }

    /// Whether the limits are kept when V is `value_scale` times as large as N(0, 1).
    pub fn within_limits(&self, value_scale: f64) -> bool {
        self.max <= END_TO_END.max * value_scale
            && self.mean <= END_TO_END.mean * value_scale
            && self.percent_over <= END_TO_END.percent_over
    }
}

impl std::fmt::Display for EndToEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "max {:.2e}, mean {:.2e}, {:.2} % over", self.max, self.mean, self.percent_over)
    }
}

impl Standard {
    /// What 8-bit outputs are judged by: the answer to the original inputs and, for how far quantisation alone is from it,
    /// the answer to the dequantised ones.
    pub fn eight_bit(original: Vec<f64>, dequantised: &Reference, value_scale: f64) -> Self {
        let mut distances = Distances::default();
        let dim = dequantised.dim_v.max(1);
        for (index, (&got, &want)) in dequantised.o.iter().zip(&original).enumerate() {
            // Rows of no sequence are zeros in both, and would make the mean of the others small. Outputs are judged without them.
            if dequantised.is_owned(index / dim) {
                // The exact answer is not rounded to any output format; f32 is the widest there is.
                add_end_to_end(&mut distances, got, want, Float::F32, value_scale, [0; 4]);
            }
        }
        Self::EightBit { original, quantisation: EndToEnd::new(&distances) }
    }
}

fn add_end_to_end(
    distances: &mut Distances,
    got: f64,
    want: f64,
    output: Float,
    value_scale: f64,
    at: [usize; 4],
) {
    if let Some(error) = distances.add(got, want, output, at) {
        distances.bad += usize::from(error > END_TO_END.max * value_scale);
    }
}

/// How far an output, or a part of it, is from the answer to the dequantised and to the original inputs.
#[derive(Default)]
struct Seen {
    own: Distances,
    whole: Distances,
}

impl Tally for Seen {
    fn merge(&mut self, other: Self) {
        self.own.merge(other.own);
        self.whole.merge(other.whole);
    }
}

/// Whether an output keeps the dequantised rule.
pub(crate) fn is_within(problem: &Problem, truth: &Truth, o: &TensorView<'_>) -> bool {
    let own = over_rows(problem, o, |own: &mut Distances, row, at, values| {
        if !truth.reference.is_owned(row) {
            return;
        }
        for (d, &got) in values.iter().enumerate() {
            add_own(own, truth, problem.output_float(), (row * truth.reference.dim_v + d, at(d), got));
        }
    });
    let errors = own.errors();
    own.bad == 0 && errors.wrongly_finite == 0 && is_near(&errors, problem.output_float())
}

/// The relative limit. An answer below the smallest number of the output's type, as sinks that take all weight leave it, is
/// rounded to 0, and is right then.
fn is_near(errors: &Errors, output: Float) -> bool {
    errors.relative < DEQUANTISED || errors.max <= output.rounding_error(0.0)
}

fn add_own(own: &mut Distances, truth: &Truth, output: Float, (index, at, got): (usize, [usize; 4], f64)) {
    let want = truth.reference.o[index];
    if let Some(error) = own.add(got, want, output, at) {
        let rounding = if output == Float::BF16 { output.rounding_error(want) } else { 0.0 };
        own.bad += usize::from(error >= DEQUANTISED * truth.value_scale + rounding);
    }
}

impl Tally for Distances {
    fn merge(&mut self, other: Self) {
        Self::merge(self, other);
    }
}

/// Judges the output of an 8-bit kernel.
pub(super) fn judge(
    problem: &Problem,
    truth: &Truth,
    original: &[f64],
    quantisation: EndToEnd,
    o: &TensorView<'_>,
    lse: Option<&[f32]>,
) -> Judgement {
    let (reference, value_scale, output) = (&truth.reference, truth.value_scale, problem.output_float());
    let Seen { own, whole } = over_rows(problem, o, |seen: &mut Seen, row, at, values| {
        if !reference.is_owned(row) {
            return;
        }
        for (d, &got) in values.iter().enumerate() {
            let index = row * reference.dim_v + d;
            add_own(&mut seen.own, truth, output, (index, at(d), got));
            add_end_to_end(&mut seen.whole, got, original[index], output, value_scale, at(d));
        }
    });
    let errors = own.errors();
    let mut rules = vec![
        finite_rule(&errors),
        Rule {
            name: "dequantised".to_owned(),
            applies: true,
            passed: own.bad == 0 && is_near(&errors, output),
            detail: format!(
                "{} of {} elements not within {:.0e}, max error {:.2e} at {:?}; relative error {:.2e}, allowed below \
                 {DEQUANTISED:.0e}",
                own.bad,
                own.count,
                DEQUANTISED * value_scale,
                errors.max,
                errors.worst_at,
                errors.relative,
            ),
        },
        end_to_end_rule(EndToEnd::new(&whole), quantisation, value_scale),
    ];
    rules.extend(lse.map(|lse| judge_lse(problem, reference, lse)));
    Judgement { errors, rules }
}

fn end_to_end_rule(measured: EndToEnd, quantisation: EndToEnd, value_scale: f64) -> Rule {
    let allowed = EndToEnd {
        max: END_TO_END.max * value_scale,
        mean: END_TO_END.mean * value_scale,
        percent_over: END_TO_END.percent_over,
    };
    let applies = quantisation.within_limits(value_scale);
    let detail = if applies {
        format!("{measured}; allowed {allowed}; of which quantisation alone: {quantisation}")
    } else {
        format!(
            "not applicable: the exact answer to the quantised inputs is itself past the limits ({quantisation}; \
             allowed {allowed}); measured {measured}"
        )
    };
    Rule {
        name: "end-to-end".to_owned(),
        applies,
        passed: !applies || measured.within_limits(value_scale),
        detail,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_core::{DType, Tensor};

    use crate::{Case, Control, elements, inputs::Family};

    fn case(text: &str, dtype: DType, family: Family) -> Case {
        Case::new(Problem::new(text.parse().unwrap(), dtype).unwrap(), family, 1, None)
    }

    /// The oracle's answer with something done to each element.
    fn answer(case: &Case, change: impl Fn(usize, f64) -> f64 + Sync) -> Tensor {
        let (o, problem) = (&case.truth.reference.o, &case.problem);
        let [_, heads, seq, dim] = problem.o_shape();
        elements::from_fn(problem.o_shape(), problem.output_dtype(), problem.layout(), |[b, h, s, d]| {
            let index = ((b * heads + h) * seq + s) * dim + d;
            change(index, o[index])
        })
    }

    fn rule(judgement: &Judgement, name: &str) -> Rule {
        judgement.rules.iter().find(|rule| rule.name == name).unwrap().clone()
    }

    fn applies(case: &Case) -> bool {
        let judgement = case.judge(&answer(case, |_, x| x).view(), None);
        assert!(judgement.passed(), "{} {}: {}", case.problem, case.family, judgement.summary());
        let rule = rule(&judgement, "end-to-end");
        assert_eq!(rule.detail.contains("not applicable"), !rule.applies, "{}", rule.detail);
        // A rule that was not applied is told in the summary of a right output.
        assert_eq!(judgement.summary().contains("not applicable"), !rule.applies);
        rule.applies
    }

    #[test]
    fn every_control_fails_every_rule_that_applies() {
        for dtype in DType::EIGHT_BIT {
            for text in ["b1h1s512d64", "b1h1s512d64:causal", "b1h1s2048d64", "b1h1s2048d64:causal"] {
                let case = case(text, dtype, Family::Normal);
                for control in Control::of(&case.problem) {
                    let judgement = case.judge(&case.control_output(control).unwrap().view(), None);
                    let (own, whole) = (rule(&judgement, "dequantised"), rule(&judgement, "end-to-end"));
                    assert!(!own.passed, "{text} {dtype} {control}: {}", own.detail);
                    assert!(whole.passed != whole.applies, "{text} {dtype} {control}: {}", whole.detail);
                }
            }
        }
    }

    /// Where quantisation alone loses too much is a fact of the codes, not of any kernel.
    #[test]
    fn the_end_to_end_rule_applies_where_quantisation_leaves_room() {
        for text in ["mission", "mission:causal"] {
            for dtype in [DType::U8, DType::I8] {
                assert!(applies(&case(text, dtype, Family::Normal)), "{text} {dtype}");
            }
        }
        assert!(applies(&case("mission", DType::E4M3, Family::Normal)));
        // Rows that see few keys are nearly V itself, of which e4m3 keeps three bits after the leading one.
        assert!(!applies(&case("mission:causal", DType::E4M3, Family::Normal)));
        for dtype in DType::EIGHT_BIT {
            assert!(applies(&case("b1h2s130d64", dtype, Family::MaxValues)));
            assert!(!applies(&case("b1h2s130d64", dtype, Family::LargeLogits)));
        }
    }

    #[test]
    fn one_wrong_element_or_many_slightly_wrong_ones_fail() {
        for dtype in DType::EIGHT_BIT {
            let case = case("b1h2s512d64", dtype, Family::Normal);
            let moved = |by: f64| {
                let output = answer(&case, |index, x| if index == 777 { x + by } else { x });
                case.judge(&output.view(), None)
            };
            assert!(moved(9e-3).passed());
            let wrong = moved(1.1e-2);
            assert!(!rule(&wrong, "dequantised").passed && wrong.errors.worst_at == [0, 0, 12, 9]);
            // A little more than a percent of every element stays below the absolute limit.
            let scaled = case.judge(&answer(&case, |_, x| 1.012 * x).view(), None);
            assert!(scaled.errors.percent_bad == 0.0 && scaled.errors.relative > DEQUANTISED);
            assert!(!rule(&scaled, "dequantised").passed);
        }
    }

    /// The farther of an element's two neighbours in bf16 may be more than 1e-2 away; the next one is wrong.
    #[test]
    fn bf16_outputs_may_be_rounded() {
        let case = case("b1h2s64/3d64:kv=e4m3", DType::BF16, Family::Normal);
        let step = |x: f64| 2.0 * Float::BF16.rounding_error(x);
        let beyond = |steps: f64| {
            let farther = |x: f64| ((x.abs() / step(x)).floor() + steps) * step(x) * x.signum();
            case.judge(&answer(&case, |_, x| if x.abs() > 2.0 { farther(x) } else { x }).view(), None)
        };
        let rounded = beyond(1.0);
        assert!(rounded.errors.max > DEQUANTISED && rule(&rounded, "dequantised").passed);
        assert!(!rule(&beyond(2.0), "dequantised").passed);
    }

    /// The sink takes so much weight that f16 has no number for the rest.
    #[test]
    fn answers_too_small_for_the_output_may_be_zero() {
        for (text, dtype, family) in [
            ("b2h1s1d3/5:causal:sinks", DType::E4M3, Family::FirstKey),
            ("b1h1s1/130d3:causal:mask=h:sinks:kv=f32", DType::I8, Family::LargeLogits),
        ] {
            for seed in 0..4 {
                let problem = Problem::new(text.parse().unwrap(), dtype).unwrap();
                let case = Case::new(problem, family, seed, None);
                let judgement = case.judge(&answer(&case, |_, x| x).view(), None);
                assert!(judgement.passed(), "{text} {seed}: {}", judgement.summary());
                assert!(case.broken_controls().is_empty(), "{text} {seed}: {:?}", case.broken_controls());
            }
        }
    }

    /// Of packed queries half may belong to no sequence. What codes lose is not less for it.
    #[test]
    fn rows_of_no_sequence_do_not_make_quantisation_look_better() {
        let problem =
            Problem::new("b1h4/1s65/64d64/5:varlen=q:paged=256:kv=e4m3".parse().unwrap(), DType::BF16);
        let case = Case::new(problem.unwrap(), Family::ConstantRows, 0, None);
        let (reference, standard) = (&case.truth.reference, &case.truth.standard);
        let Standard::EightBit { original, quantisation } = standard else { unreachable!("codes") };
        let is_owned = |index: &usize| reference.is_owned(index / 5);
        let errors: Vec<f64> = (0..original.len())
            .filter(is_owned)
            .map(|index| (reference.o[index] - original[index]).abs())
            .collect();
        assert!(errors.len() < original.len() && !errors.is_empty());
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!((quantisation.mean - mean).abs() < 1e-9, "{quantisation} and {mean}");
    }

    #[test]
    fn each_end_to_end_limit_counts() {
        let measured = |max, mean, percent_over| EndToEnd { max, mean, percent_over };
        let none = EndToEnd::default();
        let passes = |measured| end_to_end_rule(measured, none, 1.0).passed;
        assert!(passes(measured(0.06, 0.02, 1.0)));
        assert!(!passes(measured(0.061, 0.0, 0.0)));
        assert!(!passes(measured(0.06, 0.021, 0.0)));
        assert!(!passes(measured(0.06, 0.0, 1.1)));
        // Ten times larger values may have ten times larger errors, in as many elements.
        assert!(end_to_end_rule(measured(0.6, 0.2, 1.0), none, 10.0).passed);
        assert!(!end_to_end_rule(measured(0.6, 0.2, 1.1), none, 10.0).passed);
    }

    #[test]
    fn nan_and_a_wrong_lse_fail() {
        for dtype in DType::EIGHT_BIT {
            let case = case("b1h2s33d16:causal", dtype, Family::Normal);
            let right = answer(&case, |_, x| x);
            let lse = |by: f64| case.truth.reference.lse.iter().map(|x| (x + by) as f32).collect::<Vec<_>>();
            assert!(case.judge(&right.view(), Some(&lse(0.0))).passed());
            let off = case.judge(&right.view(), Some(&lse(2e-2)));
            assert!(!rule(&off, "lse").passed && rule(&off, "dequantised").passed);
            let nan = answer(&case, |index, x| if index == 5 { f64::NAN } else { x });
            assert!(!rule(&case.judge(&nan.view(), None), "finite").passed);
        }
    }
}
