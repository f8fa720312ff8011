//! Every kernel on every instruction set gives the right answer.

use crate::running::{run, run_gapped, ways};
use evosdpa_core::{Alignment, DType, Layout, Mask, Problem, Shape, Sizes};
use evosdpa_oracle::Case;
use evosdpa_oracle::inputs::Family;
use proptest::prelude::*;

pub(crate) fn check(problem: &Problem, family: Family, seed: u64) {
    let case = Case::new(*problem, family, seed, None);
    for (kernel, options) in ways() {
        let (o, lse) = run(problem, &case.inputs, kernel, &options);
        let judgement = case.judge(&o.view(), Some(&lse));
        assert!(
            judgement.passed(),
            "{} {:?} {problem} {family}: {}",
            kernel.name(),
            options.isa,
            judgement.summary()
        );
    }
}

#[test]
fn named_shapes_of_every_kind() {
    let shapes = [
        "tiny",
        "tiny:causal",
        "b1h2s1d64",
        "b1h1s3d40",
        "b2h1s33d80",
        "b1h1s63/65d96",
        "b1h2s65d160:causal",
        "b1h1s113/203d64:causal-br",
        "b1h1s203/113d64:causal-br",
        "b1h1s203/113d64:causal",
        "b1h1s513d32:window=100/0",
        "b1h1s200d16:window=7/9",
        "b1h4/2s70d64",
        "b1h8/1s5/300d128",
        "b1h8/1s20/300d64:causal-br",
        "b1h4/4s1/700d128",
        "b2h8/2s1/300d96",
        "b1h6/2s2/3000d64:causal-br",
        "b1h1s40/5000d32",
        "b1h1s239/1d64",
        "b1h1s1/1d1",
        "b1h1s50d192/128:causal",
        "b1h1s50d40/72",
        "b1h1s60d512",
        "b1h1s17/90d256:causal-br",
        "b1h16/1s9/260d33:window=40/0",
        "b1h1s1/2500d64:window=1300/0",
        "b1h12/1s1/400d128",
        "b1h1s70/601d64",
        "b1h1s620d40/72:causal",
        "b1h1s40/1100d33:window=530/0",
    ];
    for (seed, shape) in shapes.iter().enumerate() {
        for dtype in DType::FLOATS {
            let problem = Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap();
            check(&problem, Family::Normal, seed as u64);
        }
    }
}

/// 8-bit queries, keys and values with scales of every reach, and outputs of another type, on tiles, splits and decode.
#[test]
fn types_of_their_own() {
    let sizes = ["b2h4/2s9/130d40", "b1h2s100d64:causal", "b2h4/1s1/1500d128", "b1h6/2s2/300d33:causal-br"];
    let halves = [DType::F16, DType::BF16, DType::F32];
    for (seed, size) in sizes.iter().enumerate() {
        for reach in ["tensor", "head", "token"] {
            for (kv, dtype) in ["u8", "e4m3", "i8"].into_iter().flat_map(|kv| halves.map(|dtype| (kv, dtype)))
            {
                let shape = format!("{size}:kv={kv}:scales={reach}");
                check(
                    &Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap(),
                    Family::Normal,
                    seed as u64,
                );
            }
            for dtype in DType::EIGHT_BIT {
                let shape = format!("{size}:o=f32:scales={reach}");
                check(
                    &Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap(),
                    Family::Normal,
                    seed as u64,
                );
            }
        }
        for (types, dtype) in [("kv=bf16", DType::F16), ("kv=f16:o=bf16", DType::F32), ("o=f32", DType::BF16)]
        {
            let shape = format!("{size}:{types}");
            check(
                &Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap(),
                Family::Normal,
                seed as u64,
            );
        }
    }
}

#[test]
fn every_input_family() {
    for family in Family::ALL {
        for dtype in DType::FLOATS {
            for shape in ["b1h2s130d64", "b1h1s100/150d40:causal-br", "b1h4/1s1/333d64", "b1h1s40/600d64"] {
                check(&Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap(), family, 11);
            }
        }
    }
}

pub(crate) fn masks() -> impl Strategy<Value = Mask> {
    let alignment = prop_oneof![Just(Alignment::TopLeft), Just(Alignment::BottomRight)];
    let side = prop_oneof![Just(None), (0usize..120).prop_map(Some)];
    prop_oneof![
        Just(Mask::Full),
        alignment.clone().prop_map(Mask::Causal),
        (side.clone(), side, alignment).prop_map(|(left, right, alignment)| Mask::Window {
            left,
            right,
            alignment
        }),
    ]
}

prop_compose! {
    fn problems()(
        batch in 1usize..3, heads_kv in 1usize..3, group in 1usize..9,
        seq_q in prop_oneof![1usize..8, 1usize..150], seq_kv in prop_oneof![1usize..8, 1usize..300],
        dim_qk in prop_oneof![1usize..140, Just(64), Just(128)], dim_v in prop_oneof![1usize..140, Just(64), Just(128)],
        mask in masks(), dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)],
        layout in prop_oneof![Just(Layout::Bhsd), Just(Layout::Bshd)], scale in prop_oneof![Just(None), (-0.5f32..0.5).prop_map(Some)],
    ) -> Problem {
        let sizes = Sizes { batch, heads_q: heads_kv * group, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let problem = Problem::new(Shape::new(sizes, mask).unwrap(), dtype).unwrap().with_layout(layout);
        scale.map_or(problem, |scale| problem.with_scale(scale).unwrap())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any problem, in buffers whose gaps hold NaN: right everywhere, and the gaps of the output are left alone.
    #[test]
    fn any_problem_in_poisoned_buffers(problem in problems(), seed: u64, gap in 1usize..20) {
        let case = Case::new(problem, Family::Normal, seed, Some(gap));
        for (kernel, options) in ways() {
            let (o, lse) = run_gapped(&problem, &case.inputs, kernel, &options, gap);
            let judgement = case.judge(&o.view(), Some(&lse));
            prop_assert!(judgement.passed(), "{} {:?} {problem}: {}", kernel.name(), options.isa, judgement.summary());
            let poisoned = o.bytes().chunks(problem.dtype().bytes()).filter(|c| c.iter().all(|b| *b == 0xFF)).count();
            prop_assert_eq!(poisoned, problem.rows() * gap);
        }
    }
}
