use evosdpa_core::{DType, Layout, Mask};

use super::*;
use crate::{inputs::Family, inputs::Inputs};

fn problem(text: &str, dtype: DType) -> Problem {
    Problem::new(text.parse().unwrap(), dtype).unwrap()
}

/// Attention as the formula says it, one element at a time.
fn by_formula(problem: &Problem, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let sizes = problem.sizes();
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    for b in 0..sizes.batch {
        for h in 0..sizes.heads_q {
            for i in 0..sizes.seq_q {
                inputs.q.view().row_f64(b, h, i, &mut q);
                let head = h / problem.group();
                let mut total = vec![0.0; sizes.dim_v];
                let mut sum = 0.0;
                for j in problem.band().visible(i, sizes.seq_kv) {
                    inputs.k.view().row_f64(b, head, j, &mut k);
                    inputs.v.view().row_f64(b, head, j, &mut v);
                    let score: f64 = q.iter().zip(&k).map(|(x, y)| x * y).sum();
                    let weight = (score * problem.scale() as f64).exp();
                    sum += weight;
                    total.iter_mut().zip(&v).for_each(|(t, x)| *t += weight * x);
                }
                o.extend(total.iter().map(|t| if sum == 0.0 { 0.0 } else { t / sum }));
                lse.push(sum.ln());
            }
        }
    }
    (o, lse)
}

#[test]
fn agrees_with_the_formula() {
    for text in [
        "b2h2s33d16",
        "b1h4/2s7/19d24/8:causal",
        "b1h2s19/7d40:causal-br",
        "b1h6/1s5/64d3/17",
        "b1h1s40d8:window=3/2",
        "b1h1s1d1",
    ] {
        for layout in Layout::ALL {
            let problem = problem(text, DType::F32).with_layout(layout);
            let inputs = Inputs::with_poisoned_gaps(&problem, Family::Normal, 11, 2);
            let solved = solve(&problem, &inputs.q.view(), &inputs.k.view(), &inputs.v.view());
            let (o, lse) = by_formula(&problem, &inputs);
            for (got, want) in solved.o.iter().zip(&o).chain(solved.lse.iter().zip(&lse)) {
                assert!(got == want || (got - want).abs() < 1e-12, "{text} {layout}: {got} {want}");
            }
        }
    }
}

#[test]
fn rows_without_keys_are_zero() {
    let problem = problem("b1h1s4/2d8:causal-br", DType::F16);
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let solved = solve(&problem, &inputs.q.view(), &inputs.k.view(), &inputs.v.view());
    assert!(solved.o[..16].iter().all(|&x| x == 0.0) && solved.o[16..].iter().all(|&x| x != 0.0));
    assert_eq!(solved.lse[..2], [f64::NEG_INFINITY; 2]);
}

#[test]
fn poison_reaches_only_the_rows_that_see_it() {
    let problem = problem("b1h1s4d8:causal", DType::F32);
    for (poison, at_key) in [(f32::NAN, true), (f32::NAN, false), (f32::INFINITY, false)] {
        let mut inputs = Inputs::generate(&problem, Family::Normal, 1);
        let tensor = if at_key { &mut inputs.k } else { &mut inputs.v };
        bytemuck::cast_slice_mut::<u8, f32>(tensor.bytes_mut())[2 * 8] = poison;
        let solved = solve(&problem, &inputs.q.view(), &inputs.k.view(), &inputs.v.view());
        assert!(solved.o[..16].iter().all(|x| x.is_finite()), "{poison} {at_key}");
        assert!(!solved.o[16].is_finite() && !solved.o[24].is_finite(), "{poison} {at_key}");
        assert_eq!(solved.lse[2].is_nan(), at_key);
    }
}

#[test]
fn computing_in_the_dtype_loses_what_the_dtype_loses() {
    for (dtype, low, high) in [(DType::F32, 1e-9, 2e-6), (DType::F16, 1e-5, 4e-3), (DType::BF16, 1e-4, 4e-2)]
    {
        let problem = problem("b1h2s128d64", dtype);
        let inputs = Inputs::generate(&problem, Family::Normal, 5);
        let views = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        let exact = solve(&problem, &views.0, &views.1, &views.2);
        let rounded = solve_in_dtype(&problem, &views.0, &views.1, &views.2, &Sample::whole());
        let worst = exact.o.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!((low..high).contains(&worst), "{dtype}: {worst}");
    }
}

#[test]
fn another_mask_gives_another_answer() {
    let problem = problem("tiny:causal", DType::F32);
    let inputs = Inputs::generate(&problem, Family::Normal, 5);
    let views = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let causal = solve(&problem, &views.0, &views.1, &views.2);
    let full = solve(&problem.with_mask(Mask::Full), &views.0, &views.1, &views.2);
    assert!(causal.o[0] != full.o[0]);
    // The last row sees everything either way.
    assert_eq!(causal.o[31 * 64..], full.o[31 * 64..]);
}
