//! A case: a problem with its inputs and its right answer.

use std::sync::OnceLock;

use evosdpa_core::{Float, Precision, Problem, SideInputs, Tensor, TensorView};
use rayon::prelude::*;

use crate::{
    Control, control_output,
    inputs::{Arrangement, Family, Inputs, LengthFamily},
    reference::{self, Question, Sample},
    tolerance::{self, Judgement, Standard, Truth},
};

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
        Self::arranged(problem, family, seed, row_gap, Arrangement::of(family, seed))
    }

    /// As [`Case::new`], with lengths and pages of one's own choice.
    pub fn arranged(
        problem: Problem,
        family: Family,
        seed: u64,
        row_gap: Option<usize>,
        arrangement: Arrangement,
    ) -> Self {
        Self::judged_by(problem, (family, seed, arrangement), row_gap, Sample::whole())
    }

    /// A problem as it is timed: as [`Case::new`], but every sequence is as long as the problem says, and one that would keep
    /// the oracle busy for long is solved for a sample of its rows, drawn with the seed. 8-bit problems are solved whole: their
    /// rules are about all of an output.
    pub fn in_bounded_time(problem: Problem, family: Family, seed: u64, row_gap: Option<usize>) -> Self {
        Self::bounded(problem, (family, seed, Arrangement::FULL), row_gap)
    }

    /// As [`Case::in_bounded_time`], of ordinary numbers, with lengths of a family.
    pub fn timed(problem: Problem, seed: u64, lengths: LengthFamily) -> Self {
        Self::bounded(problem, (Family::Normal, seed, Arrangement::timed(lengths)), None)
    }

    fn bounded(problem: Problem, drawn: (Family, u64, Arrangement), row_gap: Option<usize>) -> Self {
        let (_, seed, _) = drawn;
        let sample =
            if problem.has_codes() { Sample::whole() } else { Sample::of_at_most(&problem, MOST_WORK, seed) };
        Self::judged_by(problem, drawn, row_gap, sample)
    }

    /// One adversarial case of a problem, the family by the seed, for a sample of rows that takes the oracle little time.
    /// `None` for 8-bit problems that would take long: their rules are about all of an output.
    pub fn adversarial(problem: Problem, seed: u64) -> Option<Self> {
        let families = Family::adversarial();
        let family = families[(seed % families.len() as u64) as usize];
        let sample = Sample::of_at_most(&problem, MOST_WORK / 8, seed);
        let solvable = !problem.has_codes() || sample.count(&problem).is_none();
        let drawn = (family, seed, Arrangement::of(family, seed));
        solvable.then(|| Self::judged_by(problem, drawn, None, sample))
    }

    fn judged_by(
        problem: Problem,
        (family, seed, arrangement): (Family, u64, Arrangement),
        row_gap: Option<usize>,
        sample: Sample,
    ) -> Self {
        let inputs = Inputs::arranged(&problem, family, seed, row_gap, arrangement);
        let values = inputs.dequantized(&problem);
        let question = question_of(&problem, &values);
        let reference = reference::solve_rows(&question, sample);
        let value_scale = family.value_scale(&problem);
        let standard = if problem.has_codes() {
            let original = Inputs::original(&problem, family, seed, arrangement);
            let original = question_of(&problem, &original);
            Standard::eight_bit(reference::solve_output(&original), &reference, value_scale)
        } else {
            match problem.compute_float() {
                Float::F32 => Standard::Single,
                Float::F16 | Float::BF16 => {
                    let naive = reference::solve_in_dtype(&question, &reference.sample);
                    // An overflow of the naive computation says nothing of how close one may come: count finite errors only.
                    let errors = naive.par_iter().zip(&reference.o).map(|(&a, b)| (f64::from(a) - b).abs());
                    let naive_max_error = errors.filter(|error| error.is_finite()).reduce(|| 0.0, f64::max);
                    let rounds_weights = family.is_adversarial() && problem.precision() == Precision::Default;
                    Standard::Half { naive_max_error, rounds_weights }
                }
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

    /// The output that a control puts in place of a kernel's; `None` where the problem has no such control.
    pub fn control_output(&self, control: Control) -> Option<Tensor> {
        let of = || control_output::of(self, &self.inputs.dequantized(&self.problem), control);
        control.applies(&self.problem).then(of)
    }

    /// The first row that belongs to no sequence and is not zeros with a log-sum-exp of −∞.
    pub fn first_uncleared_row(&self, o: &TensorView<'_>, lse: Option<&[f32]>) -> Option<[usize; 3]> {
        let ([_, heads, seq, dim], [batch_stride, head_stride, row_stride, _]) = (o.shape(), o.strides());
        let size = o.dtype().bytes();
        let mut unowned = (0..self.problem.rows()).filter(|&row| !self.truth.reference.is_owned(row));
        let at = |row: usize| [row / (heads * seq), row / seq % heads, row % seq];
        unowned
            .find(|&row| {
                let [b, h, s] = at(row);
                let start = b * batch_stride + h * head_stride + s * row_stride;
                o.bytes()[start * size..(start + dim) * size].iter().any(|&byte| byte != 0)
                    || lse.is_some_and(|lse| lse[row] != f32::NEG_INFINITY)
            })
            .map(at)
    }

    /// The controls that the case's own rules let pass: if there is one, the rules are broken on this data.
    pub fn broken_controls(&self) -> &[Control] {
        self.broken_controls
            .get_or_init(|| self.accepted_controls(|o| tolerance::passes(&self.problem, &self.truth, o)))
    }

    /// Puts every control through `judge`, which must refuse each one that is really wrong, and lists what it let pass.
    ///
    /// On some data a control *is* the answer (the mean of V when all scores are equal, V itself when there is one key):
    /// such a control, within the forward error bound of the oracle at every element, proves nothing and is skipped. So is, in
    /// 8-bit problems, one that is nearer than what such kernels are allowed, 1 % of the answer's norm included: with few
    /// keys, sinks or small caps another mask, scale or length may be worth no more.
    pub fn accepted_controls(&self, judge: impl Fn(&TensorView<'_>) -> bool) -> Vec<Control> {
        let values = self.inputs.dequantized(&self.problem);
        let wrong_but_accepted = |control: &Control| {
            let output = control_output::of(self, &values, *control);
            !self.is_beyond_telling(&output.view()) && judge(&output.view())
        };
        Control::of(&self.problem).filter(wrong_but_accepted).collect()
    }

    fn is_beyond_telling(&self, o: &TensorView<'_>) -> bool {
        let is_coarse = self.problem.has_codes();
        self.is_right(o) || (is_coarse && tolerance::eight_bit::is_within(&self.problem, &self.truth, o))
    }

    /// Whether an output is within the forward error bound of the oracle everywhere.
    pub fn is_right(&self, o: &TensorView<'_>) -> bool {
        let reference = &self.truth.reference;
        let [_, heads, seq, dim] = self.problem.o_shape();
        let mut row = Vec::new();
        let judged = |r: &usize| reference.sample.has(*r) && reference.is_owned(*r);
        (0..self.problem.rows()).filter(judged).all(|r| {
            o.row_f64(r / (heads * seq), r / seq % heads, r % seq, &mut row);
            row.iter().enumerate().all(|(d, &got)| {
                let error = (got - reference.o[r * dim + d]).abs();
                error <= tolerance::error_bound(&self.problem, reference, r, d)
            })
        })
    }
}

/// What is asked of inputs that hold the values meant.
pub(crate) fn question_of<'a>(problem: &Problem, inputs: &'a Inputs) -> Question<'a> {
    question(problem, inputs, &inputs.side.views(None))
}

/// The same with other lengths, pages or modifiers, which fit the problem as the inputs do.
pub(crate) fn question<'a>(problem: &Problem, inputs: &'a Inputs, side: &SideInputs<'a>) -> Question<'a> {
    let tensors = [inputs.q.view(), inputs.k.view(), inputs.v.view()];
    match Question::new(problem, tensors, side) {
        Ok(question) => question,
        // Inputs are drawn for their problem, and controls change them into others that fit one.
        Err(error) => unreachable!("drawn inputs fit their problem: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;

    use super::*;
    use crate::elements;

    fn case(text: &str, dtype: DType, family: Family) -> Case {
        Case::new(Problem::new(text.parse().unwrap(), dtype).unwrap(), family, 1, None)
    }

    fn rounded_truth(case: &Case) -> Tensor {
        let (o, [_, heads, seq, dim]) = (&case.truth.reference.o, case.problem.o_shape());
        elements::from_fn(
            case.problem.o_shape(),
            case.problem.output_dtype(),
            case.problem.layout(),
            |[b, h, s, d]| o[((b * heads + h) * seq + s) * dim + d],
        )
    }

    #[test]
    fn the_truth_passes_and_controls_fail() {
        for dtype in DType::ALL {
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
        let all: Vec<Control> = Control::of(&case.problem).collect();
        assert!(all.len() == 5 && case.accepted_controls(|_| true) == all);
    }

    #[test]
    fn a_control_that_is_right_proves_nothing() {
        for dtype in [DType::F32, DType::U8, DType::E4M3, DType::I8] {
            let case = case("b1h1s4/1d8", dtype, Family::Normal);
            // With one key the answer is V whatever the scores are.
            let mut wrong = case.accepted_controls(|_| true);
            wrong.retain(|control| *control != Control::NoScales);
            assert_eq!(wrong, [Control::Zeros, Control::PreviousOutput]);
        }
    }

    /// With few keys, sinks or small caps the answers to another question may be nearer than 8 bits can tell. Where there are
    /// many keys and plain scores they are not.
    #[test]
    fn what_eight_bits_cannot_tell_is_no_broken_gate() {
        for (text, dtype, family) in [
            ("b2h14/2s1/65d3:window=50/0:bias=k:kv=f16", DType::I8, Family::OneHot),
            ("b1h3s7/130d8/1:window=inf/2:varlen:mask=bk:sinks", DType::U8, Family::OneHot),
            ("b3h8/2s2/1d8:used-q:alibi:mask:sinks", DType::E4M3, Family::LargeLogits),
            ("b3h12/3s16/1d8:varlen:alibi:sinks:kv=e4m3:scales=tensor", DType::F32, Family::OneHot),
            ("b2h2/2s1/65d3:used:softcap=0.001", DType::U8, Family::Uniform),
        ] {
            for seed in 0..4 {
                let problem = Problem::new(text.parse().unwrap(), dtype).unwrap();
                let case = Case::new(problem, family, seed, None);
                assert!(case.broken_controls().is_empty(), "{text} {seed}: {:?}", case.broken_controls());
            }
        }
        for dtype in DType::EIGHT_BIT {
            for text in ["mission", "mission:causal"] {
                let case = case(text, dtype, Family::Normal);
                let all: Vec<Control> = Control::of(&case.problem).collect();
                assert_eq!(case.accepted_controls(|_| true), all, "{text} {dtype}");
            }
        }
    }

    #[test]
    fn a_sample_judges_its_rows_and_wants_the_others_finite() {
        let problem = Problem::new("b1h2s400d16".parse().unwrap(), DType::BF16).unwrap();
        let sample = Sample::of_at_most(&problem, (400 * 400 * 32) / 4, 3);
        let case = Case::judged_by(problem, (Family::Normal, 3, Arrangement::FULL), None, sample);
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

    /// What a kernel gives that rounds its weights to bf16 and is exact otherwise.
    fn with_rounded_weights(case: &Case) -> Tensor {
        let (problem, [_, heads, seq, dim]) = (case.problem, case.problem.o_shape());
        let (q, k, v) = (case.inputs.q.view(), case.inputs.k.view(), case.inputs.v.view());
        let mut o = vec![0.0; problem.rows() * dim];
        let (mut q_row, mut row) = (Vec::new(), Vec::new());
        for r in 0..problem.rows() {
            let (b, h, s) = (r / (heads * seq), r / seq % heads, r % seq);
            q.row_f64(b, h, s, &mut q_row);
            let keys = problem.sizes().seq_kv;
            let mut dot = |j: usize| {
                k.row_f64(b, h / problem.group(), j, &mut row);
                let score =
                    q_row.iter().zip(&row).map(|(x, y)| x * y).sum::<f64>() * f64::from(problem.scale());
                let cap = problem.scores().softcap.map(|cap| f64::from(cap.value()));
                cap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let scores: Vec<f64> = (0..keys).map(&mut dot).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            for (j, score) in scores.iter().enumerate() {
                v.row_f64(b, h / problem.group(), j, &mut row);
                let weight = problem.compute_float().round((score - largest).exp()) / sum;
                o[r * dim..][..dim].iter_mut().zip(&row).for_each(|(o, x)| *o += weight * x);
            }
        }
        let value = |[b, h, s, d]: [usize; 4]| o[((b * heads + h) * seq + s) * dim + d];
        elements::from_fn(problem.o_shape(), problem.output_dtype(), problem.layout(), value)
    }

    #[test]
    fn rounded_weights_pass_with_many_keys_unless_precision_is_asked_for() {
        let passes = |text: &str, family| {
            let case = case(text, DType::BF16, family);
            assert!(case.broken_controls().is_empty(), "{text} {family}: {:?}", case.broken_controls());
            case.judge(&with_rounded_weights(&case).view(), None).passed()
        };
        for family in [Family::LargeLogits, Family::OneHot, Family::ConstantRows] {
            assert!(passes("b1h4/2s70/515d64", family), "{family}");
        }
        assert!(!passes("b1h4/2s70/515d64:precise", Family::LargeLogits));
        // Few keys, or independent noise: 1e-3 as ever.
        assert!(!passes("b1h4/2s70/200d64", Family::LargeLogits));
        assert!(passes("b1h4/2s70/515d64:precise", Family::Normal));
    }

    /// One key holds the row, the others keep weights that f16 has few digits for. Where the one key's value is next to 0, they show.
    #[test]
    fn faint_weights_may_be_rounded_as_f16_rounds_them() {
        let case = case("b2h4s300d64:softcap=30", DType::F16, Family::OneHot);
        let judgement = case.judge(&with_rounded_weights(&case).view(), None);
        assert!(judgement.passed(), "{}", judgement.summary());
        assert!(case.broken_controls().is_empty());
    }

    #[test]
    fn one_wrong_element_is_enough() {
        for dtype in DType::FLOATS {
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
            assert!(!tolerance::passes(&case.problem, &case.truth, &output.view()), "{dtype}");
            assert!(tolerance::passes(&case.problem, &case.truth, &rounded_truth(&case).view()), "{dtype}");
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
