//! One question with its data and its answer, and the wrong answers that a gate must refuse.

use std::{fmt, str::FromStr, sync::OnceLock};

use evosdpa_core::{Alignment, DType, Error, Mask, Problem, Tensor, TensorView, error::nearest};

use crate::{
    elements,
    inputs::{Family, Inputs},
    reference::{self, Sample},
    tolerance::{self, Judgement, Standard, Truth},
};

/// A wrong answer that looks like one: if a gate lets it pass, the gate is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// Nothing was computed.
    Zeros,
    /// V was copied to the output.
    CopyOfV,
    /// Every row is the mean of V: a softmax that ignores its scores.
    MeanOfV,
    /// What a call before this one left in the buffer: the answer to other inputs of the same family. With several heads it
    /// is the answer of each one's neighbour.
    PreviousOutput,
    /// In the first head the right answer to the question with another mask; in the others nothing is wrong.
    AnotherMask,
}

impl Control {
    /// Every control.
    pub const ALL: [Self; 5] =
        [Self::Zeros, Self::CopyOfV, Self::MeanOfV, Self::PreviousOutput, Self::AnotherMask];

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::CopyOfV => "copy-of-v",
            Self::MeanOfV => "mean-of-v",
            Self::PreviousOutput => "previous-output",
            Self::AnotherMask => "another-mask",
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Control {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|control| control.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "negative control",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|control| control.name())),
            allowed: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// Multiply-adds of the largest problem that [`Case::in_bounded_time`] solves whole: twice `long128`, some seconds on two cores.
const MOST_WORK: u64 = 1 << 35;

/// A problem with its inputs and everything needed to judge an output.
#[derive(Clone, Debug)]
pub struct Case {
    /// What is asked.
    pub problem: Problem,
    /// How the inputs were drawn.
    pub family: Family,
    /// The seed they were drawn with.
    pub seed: u64,
    /// Q, K and V.
    pub inputs: Inputs,
    /// What is right.
    pub truth: Truth,
    /// What [`Case::broken_controls`] found, once it has looked: the same for every kernel.
    broken_controls: OnceLock<Vec<Control>>,
}

impl Case {
    /// Draws inputs and solves the problem. With a row gap, the inputs lie in larger buffers with NaN in the gaps.
    pub fn new(problem: Problem, family: Family, seed: u64, row_gap: Option<usize>) -> Self {
        Self::judged_by(problem, family, seed, row_gap, Sample::whole())
    }

    /// As [`Case::new`], but a problem that would keep the oracle busy for long is solved for a sample of its rows, drawn with
    /// the seed. 8-bit problems are solved whole: their rules are about all of an output.
    pub fn in_bounded_time(problem: Problem, family: Family, seed: u64, row_gap: Option<usize>) -> Self {
        let sample = match problem.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Sample::of_at_most(&problem, MOST_WORK, seed),
            DType::U8 | DType::E4M3 => Sample::whole(),
        };
        Self::judged_by(problem, family, seed, row_gap, sample)
    }

    fn judged_by(
        problem: Problem,
        family: Family,
        seed: u64,
        row_gap: Option<usize>,
        sample: Sample,
    ) -> Self {
        let inputs = match row_gap {
            None => Inputs::generate(&problem, family, seed),
            Some(gap) => Inputs::with_poisoned_gaps(&problem, family, seed, gap),
        };
        let values = inputs.dequantized();
        let (q, k, v) = (values.q.view(), values.k.view(), values.v.view());
        let reference = reference::solve_rows(&problem, &q, &k, &v, sample);
        let value_scale = family.value_scale(&problem);
        let standard = match problem.dtype() {
            DType::F32 => Standard::Single,
            DType::F16 | DType::BF16 => {
                let naive = reference::solve_in_dtype(&problem, &q, &k, &v, &reference.sample);
                // An overflow of the naive computation says nothing of how close one may come: count finite errors only.
                let errors = naive.iter().zip(&reference.o).map(|(a, b)| (a - b).abs());
                let naive_max_error = errors.filter(|error| error.is_finite()).fold(0.0, f64::max);
                Standard::Half { naive_max_error }
            }
            DType::U8 | DType::E4M3 => {
                let original = Inputs::original(&problem, family, seed);
                let (q, k, v) = (original.q.view(), original.k.view(), original.v.view());
                let original = reference::solve_output(&problem, &q, &k, &v);
                Standard::eight_bit(original, &reference.o, value_scale)
            }
        };
        drop(values);
        let truth = Truth { reference, standard, value_scale };
        Self { problem, family, seed, inputs, truth, broken_controls: OnceLock::new() }
    }

    /// Judges an output.
    pub fn judge(&self, o: &TensorView<'_>, lse: Option<&[f32]>) -> Judgement {
        tolerance::judge(&self.problem, &self.truth, o, lse)
    }

    /// The output that a control puts in place of a kernel's.
    pub fn control_output(&self, control: Control) -> Tensor {
        let problem = &self.problem;
        let sizes = problem.sizes();
        let make = |value: &(dyn Fn([usize; 4]) -> f64 + Sync)| {
            elements::from_fn(problem.o_shape(), problem.output_dtype(), problem.layout(), value)
        };
        let row_of = |[b, h, s, _]: [usize; 4]| (b * sizes.heads_q + h) * sizes.seq_q + s;
        match control {
            Control::Zeros => make(&|_| 0.0),
            Control::CopyOfV => {
                let v = elements::values_f64(&self.inputs.dequantized().v.view());
                make(&|[b, h, s, d]| {
                    let head = b * sizes.heads_kv + h / problem.group();
                    v[(head * sizes.seq_kv + s % sizes.seq_kv) * sizes.dim_v + d]
                })
            }
            Control::MeanOfV => {
                let v = elements::values_f64(&self.inputs.dequantized().v.view());
                let heads = sizes.batch * sizes.heads_kv;
                let mut mean = vec![0.0; heads * sizes.dim_v];
                for (i, x) in v.iter().enumerate() {
                    let (head, d) = (i / (sizes.seq_kv * sizes.dim_v), i % sizes.dim_v);
                    mean[head * sizes.dim_v + d] += x / sizes.seq_kv as f64;
                }
                make(&|[b, h, _, d]| mean[(b * sizes.heads_kv + h / problem.group()) * sizes.dim_v + d])
            }
            Control::PreviousOutput if sizes.batch * sizes.heads_q > 1 => {
                let o = &self.truth.reference.o;
                let next_head = |index: [usize; 4]| (row_of(index) + sizes.seq_q) % problem.rows();
                make(&|index| o[next_head(index) * sizes.dim_v + index[3]])
            }
            Control::PreviousOutput => {
                let before = Inputs::generate(problem, self.family, self.seed.wrapping_add(1));
                let before = before.dequantized();
                let o =
                    reference::solve_roughly(problem, &before.q.view(), &before.k.view(), &before.v.view());
                make(&|index| o[row_of(index) * sizes.dim_v + index[3]])
            }
            Control::AnotherMask => {
                let other = match problem.mask() {
                    Mask::Full => Mask::Causal(Alignment::TopLeft),
                    Mask::Causal(_) | Mask::Window { .. } => Mask::Full,
                };
                let values = self.inputs.dequantized();
                let (q, k, v) = (values.q.view(), values.k.view(), values.v.view());
                let (q, k, v) = (q.first_head(), k.first_head(), v.first_head());
                let first = reference::solve_roughly(&problem.with_mask(other).of_one_head(), &q, &k, &v);
                let rest = &self.truth.reference.o;
                make(&|index| {
                    let at = row_of(index) * sizes.dim_v + index[3];
                    first.get(at).copied().unwrap_or_else(|| rest[at])
                })
            }
        }
    }

    /// The controls that the case's own rules let pass: if there is one, the rules are broken on this data.
    pub fn broken_controls(&self) -> &[Control] {
        self.broken_controls.get_or_init(|| self.accepted_controls(|o| self.judge(o, None).passed()))
    }

    /// Puts every control through `judge`, which must refuse each one that is really wrong, and lists what it let pass.
    ///
    /// On some data a control *is* the answer (the mean of V when all scores are equal, V itself when there is one key):
    /// such a control, within the forward error bound of the oracle at every element, proves nothing and is skipped.
    pub fn accepted_controls(&self, judge: impl Fn(&TensorView<'_>) -> bool) -> Vec<Control> {
        let wrong_but_accepted = |control: &Control| {
            let output = self.control_output(*control);
            !self.is_right(&output.view()) && judge(&output.view())
        };
        Control::ALL.into_iter().filter(wrong_but_accepted).collect()
    }

    fn is_right(&self, o: &TensorView<'_>) -> bool {
        let reference = &self.truth.reference;
        let sizes = self.problem.sizes();
        let mut row = Vec::new();
        (0..self.problem.rows()).filter(|&r| reference.sample.has(r)).all(|r| {
            let head = r / sizes.seq_q;
            o.row_f64(head / sizes.heads_q, head % sizes.heads_q, r % sizes.seq_q, &mut row);
            row.iter().enumerate().all(|(d, &got)| {
                let error = (got - reference.o[r * sizes.dim_v + d]).abs();
                error <= tolerance::error_bound(&self.problem, reference, r, d)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(text: &str, dtype: DType, family: Family) -> Case {
        Case::new(Problem::new(text.parse().unwrap(), dtype).unwrap(), family, 1, None)
    }

    fn rounded_truth(case: &Case) -> Tensor {
        let (o, sizes) = (&case.truth.reference.o, case.problem.sizes());
        elements::from_fn(
            case.problem.o_shape(),
            case.problem.output_dtype(),
            case.problem.layout(),
            |[b, h, s, d]| o[((b * sizes.heads_q + h) * sizes.seq_q + s) * sizes.dim_v + d],
        )
    }

    #[test]
    fn the_truth_passes_and_controls_fail() {
        for dtype in DType::ALL.into_iter().chain(DType::EIGHT_BIT) {
            for text in ["tiny", "tiny:causal", "b1h4/2s65/33d40", "b1h2s3/65d16:causal-br"] {
                for family in Family::ALL {
                    let case = case(text, dtype, family);
                    let truth = case.judge(&rounded_truth(&case).view(), None);
                    assert!(truth.passed(), "{text} {dtype} {family}: {}", truth.summary());
                    let accepted = case.accepted_controls(|o| case.judge(o, None).passed());
                    assert!(accepted.is_empty(), "{text} {dtype} {family}: {accepted:?}");
                }
            }
        }
    }

    #[test]
    fn a_gate_that_accepts_everything_is_found_out() {
        let case = case("tiny", DType::F16, Family::Normal);
        assert_eq!(case.accepted_controls(|_| true), Control::ALL);
    }

    #[test]
    fn a_control_that_is_right_proves_nothing() {
        for dtype in [DType::F32, DType::U8, DType::E4M3] {
            let case = case("b1h1s4/1d8", dtype, Family::Normal);
            // With one key the answer is V whatever the scores are.
            assert_eq!(case.accepted_controls(|_| true), [Control::Zeros, Control::PreviousOutput]);
        }
    }

    #[test]
    fn a_sample_judges_its_rows_and_wants_the_others_finite() {
        let problem = Problem::new("b1h2s400d16".parse().unwrap(), DType::BF16).unwrap();
        let sample = Sample::of_at_most(&problem, (400 * 400 * 32) / 4, 3);
        let case = Case::judged_by(problem, Family::Normal, 3, None, sample);
        let (chosen, other): (Vec<usize>, Vec<usize>) =
            (0..problem.rows()).partition(|&row| case.truth.reference.sample.has(row));
        assert!(chosen.len() > 100 && other.len() > 100);
        assert!(case.broken_controls().is_empty(), "{:?}", case.broken_controls());
        let judged = |spoil: &dyn Fn(&mut [half::bf16])| {
            let mut output = rounded_truth(&case);
            spoil(bytemuck::cast_slice_mut(output.bytes_mut()));
            case.judge(&output.view(), None)
        };
        let fine = judged(&|_| {});
        assert!(
            fine.passed() && fine.summary().contains(&format!("{} of 800 rows", chosen.len())),
            "{fine:?}"
        );
        assert!(!judged(&|o| o[chosen[60] * 16] += half::bf16::from_f32(0.1)).passed());
        assert!(judged(&|o| o[other[60] * 16] += half::bf16::from_f32(0.1)).passed());
        assert!(!judged(&|o| o[other[60] * 16] = half::bf16::NAN).passed());
        // An LSE of these may be anything but what the poison left.
        let mut lse: Vec<f32> = case.truth.reference.lse.iter().map(|&x| x as f32).collect();
        assert!(case.judge(&rounded_truth(&case).view(), Some(&lse)).passed());
        lse[other[60]] = f32::NAN;
        assert!(!case.judge(&rounded_truth(&case).view(), Some(&lse)).passed());
    }

    #[test]
    fn one_wrong_element_is_enough() {
        for dtype in DType::ALL {
            let case = case("mission", dtype, Family::Normal);
            let mut output = rounded_truth(&case);
            let size = dtype.bytes();
            let last = output.bytes().len() - size;
            // Move the last element by a little more than the tolerance.
            let wrong = elements::from_fn([1, 1, 1, 1], dtype, case.problem.layout(), |_| {
                case.truth.reference.o.last().unwrap() + 2e-3
            });
            output.bytes_mut()[last..].copy_from_slice(wrong.bytes());
            let judgement = case.judge(&output.view(), None);
            assert!(!judgement.passed(), "{dtype}");
            assert_eq!(judgement.errors.worst_at, [0, 7, 511, 63]);
        }
    }

    #[test]
    fn nan_and_a_wrong_lse_fail() {
        let case = case("tiny", DType::F32, Family::Normal);
        let mut output = rounded_truth(&case);
        let lse: Vec<f32> = case.truth.reference.lse.iter().map(|&x| x as f32).collect();
        assert!(case.judge(&output.view(), Some(&lse)).passed());
        let off: Vec<f32> = lse.iter().map(|x| x + 1e-3).collect();
        assert!(!case.judge(&output.view(), Some(&off)).passed());
        bytemuck::cast_slice_mut::<u8, f32>(output.bytes_mut())[9] = f32::NAN;
        assert!(!case.judge(&output.view(), None).passed());
    }
}
