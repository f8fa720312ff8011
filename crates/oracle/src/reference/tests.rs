use evosdpa_core::{DType, Layout, Mask, PageTable};

use super::*;
use crate::{case::question_of, inputs::Family, inputs::Inputs};

fn problem(text: &str, dtype: DType) -> Problem {
    Problem::new(text.parse().unwrap(), dtype).unwrap()
}

fn solved(problem: &Problem, inputs: &Inputs) -> Reference {
    solve(&question_of(problem, inputs))
}

/// Attention as the formula says it, one element at a time: rows as `[sequence][head][query]`, each with its row in the
/// output. Lengths and pages are looked up here once more, by the words of their documentation.
fn by_formula(problem: &Problem, inputs: &Inputs) -> Vec<(usize, Vec<f64>, f64)> {
    let (sizes, side, scores) = (problem.sizes(), inputs.side(), problem.scores());
    let mut rows = Vec::new();
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    for b in 0..sizes.batch {
        let starts = |cu: Option<&[i32]>| cu.map(|cu| (cu[b] as usize, cu[b + 1] as usize));
        let (first_q, end_q) = starts(side.cu_seqlens_q).unwrap_or((0, sizes.seq_q));
        let (first_k, end_k) = starts(side.cu_seqlens_kv).unwrap_or((0, sizes.seq_kv));
        let queries = end_q - first_q;
        let keys = side.seqused_kv.map_or(end_k - first_k, |used| used[b] as usize);
        for h in 0..sizes.heads_q {
            for i in 0..queries {
                let block = if side.cu_seqlens_q.is_some() { 0 } else { b };
                inputs.q.view().row_f64(block, h, first_q + i, &mut q);
                let position = i as i64
                    + match problem.mask() {
                        Mask::Causal(alignment) | Mask::Window { alignment, .. } => {
                            alignment.offset(queries, keys)
                        }
                        Mask::Full => keys as i64 - queries as i64,
                    };
                let mut total = vec![0.0; sizes.dim_v];
                let mut sum = side.sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                for j in problem.mask().band(queries, keys).visible(i, keys) {
                    let chunk_of = |at: i64| at.div_euclid(scores.chunk.unwrap().keys() as i64);
                    if scores.chunk.is_some() && chunk_of(position) != chunk_of(j as i64) {
                        continue;
                    }
                    let at = |broadcast: evosdpa_core::Broadcast| {
                        [
                            if broadcast.batch { b } else { 0 },
                            if broadcast.heads { h } else { 0 },
                            if broadcast.queries { i } else { 0 },
                        ]
                    };
                    let element = |tensor: TensorView<'_>, [b, h, i]: [usize; 3]| {
                        let mut row = Vec::new();
                        tensor.row_f64(b, h, i, &mut row);
                        row[j]
                    };
                    // A byte of zero is the code of the lowest value.
                    let lowest = -128.0 / 127.0 * 448.0;
                    if scores.mask.is_some_and(|m| element(side.mask.unwrap(), at(m)) == lowest) {
                        continue;
                    }
                    let hides = |blocks: evosdpa_core::Blocks| {
                        let own = |own: bool, i: usize| if own { i } else { 0 };
                        let mut row = Vec::new();
                        let (b, h) = (own(blocks.batch, b), own(blocks.heads, h));
                        side.blocks.unwrap().row_f64(b, h, i / blocks.queries(), &mut row);
                        row[j / blocks.keys()] == lowest
                    };
                    if scores.blocks.is_some_and(hides) {
                        continue;
                    }
                    let (block, row) = match side.page_table {
                        Some(PageTable { entries, row_stride }) => {
                            let page = problem.lengths().page.unwrap().tokens();
                            (entries[b * row_stride + j / page] as usize, j % page)
                        }
                        None if side.cu_seqlens_kv.is_some() => (0, first_k + j),
                        None => (b, j),
                    };
                    inputs.k.view().row_f64(block, h / problem.group(), row, &mut k);
                    inputs.v.view().row_f64(block, h / problem.group(), row, &mut v);
                    let dot: f64 = q.iter().zip(&k).map(|(x, y)| x * y).sum();
                    let mut score = dot * problem.scale() as f64;
                    if let Some(cap) = scores.softcap {
                        let cap = f64::from(cap.value());
                        score = cap * (score / cap).tanh();
                    }
                    if let Some(slopes) = side.alibi_slopes {
                        score -= f64::from(slopes[h]) * (position - j as i64).abs() as f64;
                    }
                    if let Some(broadcast) = scores.bias {
                        score += element(side.bias.unwrap(), at(broadcast));
                    }
                    let weight = score.exp();
                    sum += weight;
                    total.iter_mut().zip(&v).for_each(|(t, x)| *t += weight * x);
                }
                let row = if side.cu_seqlens_q.is_some() {
                    h * sizes.batch * sizes.seq_q + first_q + i
                } else {
                    (b * sizes.heads_q + h) * sizes.seq_q + i
                };
                let o = total.iter().map(|t| if sum == 0.0 { 0.0 } else { t / sum }).collect();
                rows.push((row, o, sum.ln()));
            }
        }
    }
    rows
}

fn assert_agrees(problem: &Problem, inputs: &Inputs) {
    let reference = solved(problem, inputs);
    let dim = problem.sizes().dim_v;
    let rows = by_formula(problem, inputs);
    let owned = (0..problem.rows()).filter(|&row| reference.is_owned(row)).count();
    assert_eq!(rows.len(), owned, "{problem}");
    for (row, o, lse) in rows {
        let got = reference.o[row * dim..][..dim].iter().chain([&reference.lse[row]]);
        for (got, want) in got.zip(o.iter().chain([&lse])) {
            let close = got == want || (got - want).abs() < 1e-11 * want.abs().max(1.0);
            assert!(close, "{problem} row {row}: {got} {want}");
        }
    }
}

#[test]
fn every_kind_agrees_with_the_formula() {
    for text in [
        "b3h2s5/9d8:varlen",
        "b3h2s5/9d8:causal-br:varlen",
        "b3h2s5/9d8:varlen=q:used",
        "b3h2s5/9d8:varlen=kv:causal",
        "b3h2/1s5/40d8:varlen:used:window=7/3",
        "b4h2s2/30d8:used:causal-br",
        "b3h4/2s3/50d8/5:paged=16",
        "b3h2s3/50d8:causal-br:varlen=q:used:paged=7",
        "b1h2s3/50d8:used:paged=1",
        "b2h2s9/30d8:softcap=30",
        "b2h3s9/30d8:alibi",
        "b2h3s9/30d8:causal:alibi",
        "b2h3s19/30d8:bias",
        "b2h3s19/30d8:bias=h",
        "b2h3s19/30d8:bias=bk",
        "b2h3s19/30d8:mask=bh",
        "b2h3s19/30d8:mask=k:sinks",
        "b2h3s19/30d8:mask",
        "b2h2/1s150/300d8:blocks=h64/128",
        "b2h2s19/130d8:causal-br:used:blocks=b64:mask=k:sinks",
        "b2h2s19/30d8:chunk=8",
        "b2h2s30/19d8:causal-br:chunk=8:sinks",
        "b2h2s19d8:causal:chunk=4",
        "b2h2s9/30d8:sinks",
        "b3h4/2s9/30d8:causal-br:varlen=q:used:paged=4:softcap=2.5:alibi:bias=bh:mask=h:chunk=16:sinks",
    ] {
        for family in [Family::Normal, Family::OneHot, Family::HiddenKeys, Family::Ties] {
            for seed in 0..4 {
                let problem = problem(text, DType::F32);
                assert_agrees(&problem, &Inputs::with_poisoned_gaps(&problem, family, seed, 2));
            }
        }
    }
}

#[test]
fn a_sink_is_all_that_a_row_without_keys_has() {
    let problem = problem("b1h2s4/2d8:causal-br:sinks", DType::F32);
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let solved = solved(&problem, &inputs);
    assert!(solved.o[..16].iter().all(|&x| x == 0.0) && solved.o[16] != 0.0);
    assert_eq!(solved.lse[0], f64::from(inputs.side.sinks.unwrap()[0]));
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
            assert_agrees(&problem, &inputs);
        }
    }
}

#[test]
fn rows_without_keys_are_zero() {
    let problem = problem("b1h1s4/2d8:causal-br", DType::F16);
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let solved = solved(&problem, &inputs);
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
        let solved = solved(&problem, &inputs);
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
        let exact = solved(&problem, &inputs);
        let rounded = solve_in_dtype(&question_of(&problem, &inputs), &Sample::whole());
        let errors = exact.o.iter().zip(&rounded).map(|(a, &b)| (a - f64::from(b)).abs());
        let worst = errors.fold(0.0, f64::max);
        assert!((low..high).contains(&worst), "{dtype}: {worst}");
    }
}

#[test]
fn another_mask_gives_another_answer() {
    let problem = problem("tiny:causal", DType::F32);
    let inputs = Inputs::generate(&problem, Family::Normal, 5);
    let causal = solved(&problem, &inputs);
    let full = solved(&problem.with_mask(Mask::Full), &inputs);
    assert!(causal.o[0] != full.o[0]);
    // The last row sees everything either way.
    assert_eq!(causal.o[31 * 64..], full.o[31 * 64..]);
}
