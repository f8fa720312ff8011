//! Everything that a problem can say beyond equal lengths, one dtype and a mask, on every kernel and instruction set.

use crate::correctness::{check, masks};
use crate::promises::set;
use crate::running::{elements, isas, run, run_gapped, ways};
use evosdpa_core::{
    Alignment, DType, Granularity, Kinds, Layout, Lengths, Mask, PageSize, PageTable, Problem, Scores, Shape,
    SideInputs, Sizes, Softcap, Tensor, TensorView, Types,
};
use evosdpa_core::{Blocks, Broadcast, Chunk, Float};
use evosdpa_cpu::{CpuKernel, CpuOptions, Error, FlashTiles, attention};
use evosdpa_oracle::Case;
use evosdpa_oracle::inputs::{Family, Inputs};
use proptest::prelude::*;

fn problem(shape: &str, dtype: DType) -> Problem {
    Problem::new(shape.parse::<Shape>().unwrap(), dtype).unwrap()
}

/// Tiles, splits and decode; odd sizes; several tiles a unit and several blocks of keys.
#[test]
fn kinds_one_by_one_and_together() {
    let shapes = [
        "b4h4/2s70/130d40:varlen",
        "b3h2s100/120d64:causal-br:varlen",
        "b5h4/1s1/300d64:varlen=kv",
        "b3h4/2s9/90d33:causal:varlen=q",
        "b3h2s60/200d64:causal-br:varlen:used",
        "b3h8/2s1/1500d128:used",
        "b2h2s130/150d64:window=40/3:used",
        "b2h4/2s1/700d96:paged=1",
        "b2h4/2s1/2500d64:used:paged=16",
        "b3h2s80/300d40:causal-br:used:paged=7",
        "b2h2s90/700d64:varlen=q:used:paged=256",
        "b3h2s80/200d40:causal-br:used:used-q:leftpad:indexed:paged=5",
        "b3h8/2s1/700d64:used:leftpad:indexed",
        "b1h2s120/200d64:softcap=30",
        "b2h4/1s1/300d64:softcap=2",
        "b1h2s100/150d40:causal-br:softcap=0.5",
        "b2h4/2s90/120d64:alibi",
        "b1h4/2s2/400d64:causal-br:alibi",
        "b2h3s70/140d64:bias=bh",
        "b2h4/2s70/140d33:bias=bk",
        "b2h4/2s1/300d64:bias=h",
        "b2h4/2s70/300d64:mask=bk",
        "b2h2s120/170d40:causal-br:mask=h",
        "b2h4/2s1/300d64:mask=bk",
        "b2h4/2s3/300d64:mask=bh",
        "b2h4/2s150/300d40:blocks=64",
        "b2h2s200/700d64:causal-br:blocks=bh128/64",
        "b1h4/2s130/300d330:blocks=h64",
        "b2h8/2s1/700d64:used:blocks=bh64",
        "b2h4/2s1/300d40:bias=k:blocks=b64",
        "b2h4/2s70/300d64:varlen:blocks=b64/128:mask=bk:softcap=20",
        "b1h2s150/200d64:causal-br:chunk=37",
        "b1h2s150d64:chunk=16",
        "b2h4/2s1/300d64:chunk=100",
        "b2h4/2s90/100d64:causal-br:sinks",
        "b1h8/2s1/3000d64:sinks",
        "b3h2s30/20d24:causal-br:sinks",
        "b2h2s60/1300d64:used:paged=7:sinks",
        "b1h2s60/1300d64:mask=h:alibi",
        "b1h2s60/1300d40:causal-br:chunk=700:softcap=10",
        "b2h4/2s40/90d64:causal-br:varlen:softcap=20:alibi:bias:mask=bh:chunk=29:sinks",
        "b3h4/2s2/200d64:window=90/0:used:paged=16:softcap=9:alibi:bias=k:mask=bk:sinks",
    ];
    for (seed, shape) in shapes.iter().enumerate() {
        for dtype in DType::FLOATS {
            check(&problem(shape, dtype), Family::Normal, seed as u64);
        }
        check(&problem(shape, DType::F32), Family::HiddenKeys, seed as u64);
        check(&problem(shape, DType::BF16), Family::LargeLogits, seed as u64);
    }
}

#[test]
fn eight_bit_caches_in_pages_and_packed() {
    for (seed, (shape, dtype)) in [
        ("b3h8/2s1/700d128:used:paged=16:kv=e4m3", DType::BF16),
        ("b3h4/2s70/200d64:causal-br:varlen=q:used:paged=5:kv=u8:scales=token", DType::F16),
        ("b2h4/2s1/300d40:used:paged=1:kv=e4m3:scales=token", DType::F32),
        ("b3h2s50/90d64:varlen:scales=token", DType::E4M3),
        ("b2h2s50/90d64:causal:softcap=20:mask=bk:sinks:kv=e4m3:scales=tensor", DType::BF16),
        ("b2h4/1s3/90d64:alibi:bias=h:o=f32", DType::U8),
        ("b2h4/2s1/300d40/100:kv=e4m3", DType::BF16),
        ("b1h3s1/200d161/65:kv=e4m3", DType::BF16),
        ("b1h2s70/600d72/33:causal-br:paged=7:kv=e4m3", DType::BF16),
        ("b3h8/2s1/700d128:used:paged=16:kv=i8", DType::BF16),
        ("b3h4/2s70/200d64:causal-br:varlen=q:used:paged=5:kv=i8:scales=token", DType::F16),
        ("b2h4/2s3/300d40/100:used:leftpad:paged=1:kv=i8:scales=tensor", DType::F32),
        ("b3h2s50/90d64:varlen:scales=token", DType::I8),
        ("b2h8/2s1/300d40/100:kv=u8", DType::BF16),
        ("b1h3s1/200d161/65:kv=i8:scales=tensor", DType::BF16),
        ("b1h2s70/600d72/33:causal-br:paged=7:kv=u8", DType::BF16),
        ("b1h2s70/600d72/33:causal-br:kv=i8", DType::BF16),
    ]
    .into_iter()
    .enumerate()
    {
        for family in [Family::Normal, Family::Denormals, Family::OneHot] {
            check(&problem(shape, dtype), family, seed as u64);
        }
    }
}

fn broadcasts() -> impl Strategy<Value = Option<Broadcast>> {
    let some = (any::<bool>(), any::<bool>(), any::<bool>())
        .prop_map(|(batch, heads, queries)| Some(Broadcast { batch, heads, queries }));
    prop_oneof![3 => Just(None), 2 => some]
}

prop_compose! {
    fn lengths()(
        packed_queries: bool, keys in 0usize..4, used: bool, page in prop_oneof![1usize..40, 1usize..257],
        used_queries in prop::bool::weighted(0.25), left_padded in prop::bool::weighted(0.25), indexed in prop::bool::weighted(0.25),
    ) -> Lengths {
        let (packed_keys, page) = (keys == 2, (keys == 3).then(|| PageSize::new(page).unwrap()));
        Lengths { packed_queries, packed_keys, used, used_queries, left_padded, indexed: indexed && !packed_keys, page }
    }
}

prop_compose! {
    fn scores()(
        softcap in prop_oneof![2 => Just(None), 1 => (0.5f32..60.0).prop_map(Some)], alibi: bool,
        bias in broadcasts(), mask in broadcasts(),
        blocks in prop_oneof![2 => Just(None), 1 => (1usize..3, 1usize..3, any::<bool>(), any::<bool>()).prop_map(Some)],
        chunk in prop_oneof![2 => Just(None), 1 => (1usize..90).prop_map(Some)], sinks: bool,
    ) -> Scores {
        let blocks = blocks.map(|(q, kv, batch, heads)| Blocks::new(64 * q, 64 * kv, batch, heads).unwrap());
        let (softcap, chunk) = (softcap.map(|cap| Softcap::new(cap).unwrap()), chunk.map(|keys| Chunk::new(keys).unwrap()));
        Scores { softcap, alibi, bias, mask, blocks, chunk, sinks }
    }
}

prop_compose! {
    fn types()(
        kv in prop_oneof![4 => Just(None), 1 => Just(Some(DType::E4M3)), 1 => Just(Some(DType::U8)), 1 => Just(Some(DType::I8)), 1 => Just(Some(DType::BF16))],
        output in prop_oneof![3 => Just(None), 1 => Just(Some(Float::F32)), 1 => Just(Some(Float::F16))],
        scales in 0usize..3,
    ) -> Types {
        let codes = kv.is_some_and(DType::is_eight_bit);
        Types { kv, output, scales: if codes { Granularity::ALL[scales] } else { Granularity::default() } }
    }
}

prop_compose! {
    fn problems()(
        batch in 1usize..5, heads_kv in 1usize..3, group in prop_oneof![1usize..5, Just(8)],
        seq_q in prop_oneof![1usize..4, 1usize..120], seq_kv in prop_oneof![1usize..8, 1usize..280],
        dim_qk in prop_oneof![1usize..100, Just(64)], dim_v in prop_oneof![1usize..100, Just(64)],
        mask in masks(), dtype in prop_oneof![2 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        layout in prop_oneof![Just(Layout::Bhsd), Just(Layout::Bshd)],
        lengths in lengths(), scores in scores(), types in types(),
    ) -> Problem {
        let sizes = Sizes { batch, heads_q: heads_kv * group, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let problem = Problem::new(Shape::new(sizes, mask).unwrap(), dtype).unwrap().with_layout(layout);
        // The rules for codes are absolute: rounding a large value to bf16 is more than they allow.
        let coarse = dtype == DType::BF16 && types.kv.is_some_and(DType::is_eight_bit);
        let types = Types { output: if coarse { Some(Float::F32) } else { types.output }, ..types };
        problem.with_kinds(Kinds { lengths, scores, types, ..Kinds::default() }).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Kinds in any company, in buffers whose gaps hold NaN: right everywhere, and rows of nobody are zeros.
    #[test]
    fn any_mix_of_kinds(problem in problems(), seed: u64, gap in 1usize..20) {
        let case = Case::new(problem, Family::Normal, seed, Some(gap));
        for (kernel, options) in ways().into_iter().filter(|way| way.0 == CpuKernel::Flash) {
            let (o, lse) = run_gapped(&problem, &case.inputs, kernel, &options, gap);
            let judgement = case.judge(&o.view(), Some(&lse));
            prop_assert!(judgement.passed(), "{:?} {problem}: {}", options.isa, judgement.summary());
            let uncleared = case.first_uncleared_row(&o.view(), Some(&lse));
            prop_assert_eq!(uncleared, None, "{:?} {}", options.isa, problem);
        }
    }
}

/// Bit for bit the same for any number of threads and any size of query block.
#[test]
fn kinds_do_not_depend_on_threads_or_query_blocks() {
    for shape in [
        "b4h4/2s150/200d40:causal-br:varlen:softcap=9:sinks",
        "b2h4/2s1/3000d64:used:paged=16:alibi:sinks",
        "b2h2s90/300d64:bias=h:mask=b:chunk=50",
    ] {
        let problem = problem(shape, DType::BF16);
        let inputs = Inputs::generate(&problem, Family::Normal, 5);
        for isa in isas() {
            let with = |threads, block_q| {
                let tiles = Some(FlashTiles { block_q, block_kv: 64 });
                let options = CpuOptions { threads: Some(threads), isa: Some(isa), tiles };
                let (o, lse) = run(&problem, &inputs, CpuKernel::Flash, &options);
                (o.bytes().to_vec(), lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            let first = with(1, 192);
            for (threads, block_q) in [(2, 192), (3, 1), (4, 4096)] {
                assert!(
                    with(threads, block_q) == first,
                    "{isa} {problem}: {threads} threads, {block_q} rows"
                );
            }
        }
    }
}

/// One f32 row of every head, query and key of `tokens` packed tokens.
fn packed(heads: usize, tokens: usize, dim: usize, seed: u64) -> Tensor {
    let shape = format!("b1h{heads}s{tokens}d{dim}");
    Inputs::generate(&problem(&shape, DType::F32), Family::Normal, seed).q
}

/// A sequence's answer is bit-identical alone, in a batch, and with its keys in pages of any size.
#[test]
fn a_sequence_does_not_depend_on_its_batch_or_its_pages() {
    let (heads, dim) = (2usize, 32usize);
    for (queries, keys) in [(1usize, 5000usize), (70, 90), (20, 4500)] {
        let others = 40;
        let (q, k, v) = (
            packed(heads, queries + others, dim, 1),
            packed(heads, keys + others, dim, 2),
            packed(heads, keys + others, dim, 3),
        );
        let longest = queries.max(others);
        let batch = problem(&format!("b3h{heads}s{longest}/{keys}d{dim}:causal-br:varlen"), DType::F32);
        let (cu_q, cu_k) = (
            [0, queries as i32, queries as i32, (queries + others) as i32],
            [0, keys as i32, keys as i32, (keys + others) as i32],
        );
        let alone = problem(&format!("b1h{heads}s{queries}/{keys}d{dim}:causal-br"), DType::F32);
        let part = |tensor: &'_ Tensor, rows: usize| {
            let strides = tensor.view().strides();
            (strides, [1, heads, rows, dim])
        };
        for isa in isas() {
            let options = CpuOptions { isa: Some(isa), threads: Some(2), tiles: None };
            let call = |problem: &Problem, side: &SideInputs<'_>, [q, k, v]: [TensorView<'_>; 3]| {
                let mut o = Tensor::zeros(q.shape(), DType::F32, Layout::Bhsd);
                attention(CpuKernel::Flash, problem, q, k, v, side, o.view_mut(), None, &options).unwrap();
                let mut rows = Vec::new();
                for head in 0..heads {
                    for query in 0..queries {
                        let mut row = vec![0.0; dim];
                        o.view().read_row(0, head, query, &mut row);
                        rows.extend(row.into_iter().map(f32::to_bits));
                    }
                }
                rows
            };
            let view = |tensor, rows| {
                let (strides, shape) = part(tensor, rows);
                TensorView::new(tensor.bytes(), DType::F32, shape, strides).unwrap()
            };
            let plain = [view(&q, queries), view(&k, keys), view(&v, keys)];
            let want = call(&alone, &SideInputs::default(), plain);
            let side =
                SideInputs { cu_seqlens_q: Some(&cu_q), cu_seqlens_kv: Some(&cu_k), ..SideInputs::default() };
            let got = call(&batch, &side, [q.view(), k.view(), v.view()]);
            assert!(got == want, "{isa}: {queries} queries, {keys} keys in a batch");
            for page in [1, 16, 50] {
                // The pages are stretches of the same tensor.
                let pages = keys / page;
                let [_, head_stride, row_stride, _] = k.view().strides();
                let paged = |tensor| {
                    let shape = [pages, heads, page, dim];
                    let strides = [page * row_stride, head_stride, row_stride, 1];
                    TensorView::new(Tensor::bytes(tensor), DType::F32, shape, strides).unwrap()
                };
                let table: Vec<i32> = (0..pages as i32).collect();
                let keys = pages * page;
                let shape = format!("b1h{heads}s{queries}/{keys}d{dim}:causal-br");
                let plain = [view(&q, queries), view(&k, keys), view(&v, keys)];
                let want = call(&problem(&shape, DType::F32), &SideInputs::default(), plain);
                let side = SideInputs {
                    page_table: Some(PageTable { entries: &table, row_stride: pages }),
                    ..SideInputs::default()
                };
                let paged_problem = problem(&format!("{shape}:paged={page}"), DType::F32);
                let got = call(&paged_problem, &side, [view(&q, queries), paged(&k), paged(&v)]);
                assert!(got == want, "{isa}: {queries} queries, {keys} keys in pages of {page}");
            }
        }
    }
}

/// What a boolean mask or a chunk hides has no influence, whatever it holds.
#[test]
fn masked_keys_have_no_influence_whatever_they_hold() {
    // Drawn masks hide key 4 from everybody. The chunk's key is the first that queries of the chunk before do not see, in the middle of a
    // pair of keys.
    for (shape, key) in [
        ("b1h2s70/90d24:mask=h", 4),
        ("b1h2s70/90d24:mask=k", 4),
        ("b1h4/2s1/90d24:mask=k", 4),
        ("b1h2s70/90d24:chunk=30", 4),
        ("b1h2s150/150d24:chunk=49", 49),
    ] {
        for (dtype, poison) in [(DType::F32, f32::NAN), (DType::F32, f32::INFINITY), (DType::BF16, f32::NAN)]
        {
            let problem = problem(shape, dtype);
            let clean = Inputs::generate(&problem, Family::Normal, 2);
            let mut dirty = clean.clone();
            for head in 0..2 {
                set(&mut dirty.k, [0, head, key, 3], poison);
                set(&mut dirty.v, [0, head, key, 3], poison);
            }
            for (kernel, options) in ways() {
                let (want, got) =
                    (run(&problem, &clean, kernel, &options), run(&problem, &dirty, kernel, &options));
                let rows = |(o, _): &(Tensor, Vec<f32>)| elements(&problem, o);
                let Sizes { seq_q, seq_kv, .. } = problem.sizes();
                for (row, (want, got)) in rows(&want).chunks(24).zip(rows(&got).chunks(24)).enumerate() {
                    let hidden = problem.scores().mask.is_some()
                        || !problem.visible(row % seq_q, seq_q, seq_kv).contains(&key);
                    assert_eq!(
                        want == got,
                        hidden,
                        "{shape} {dtype} {kernel:?} {options:?} row {row} {poison}"
                    );
                }
            }
        }
    }
}

/// A bias of any size is arithmetic: models fill rows with the lowest number there is, and such a row is a mean.
#[test]
fn biases_of_every_size() {
    const KEYS: usize = 50;
    for shape in ["b1h1s16/50d8:bias", "b1h1s1/50d8:bias=b", "b1h1s16/50d8:bias:mask"] {
        let problem = problem(shape, DType::F32);
        let queries = problem.sizes().seq_q;
        let mut clean = Inputs::generate(&problem, Family::Normal, 4);
        if problem.scores().mask.is_some() {
            // Rows that see nothing must not be taken for such as see what is infinite in other units, nor the other way round.
            let mut shown = Tensor::zeros([1, 1, queries, KEYS], DType::U8, Layout::Bhsd);
            shown.bytes_mut()[KEYS..].fill(1);
            clean.side.mask = Some(shown);
        }
        let value = |key: usize| f64::from(clean.v.view().elements::<f32>().unwrap()[key * 8]);
        let mean = (0..KEYS).map(value).sum::<f64>() / KEYS as f64;
        // What stands in a whole row, what at its key 7, and the first element of the output; NaN is no number.
        for (row, seven, wanted) in [
            (f32::MIN, f32::MIN, mean),
            (f32::MIN, 0.0, value(7)),
            (0.0, f32::MAX, value(7)),
            (f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0),
            (f32::NEG_INFINITY, f32::MIN, value(7)),
            (0.0, f32::NAN, f64::NAN),
            (0.0, f32::INFINITY, f64::NAN),
        ] {
            let mut inputs = clean.clone();
            let mut bias = Tensor::zeros([1, 1, queries, KEYS], DType::F32, Layout::Bhsd);
            let last = queries - 1;
            for key in 0..KEYS {
                set(&mut bias, [0, 0, last, key], if key == 7 { seven } else { row });
            }
            inputs.side.bias = Some(bias);
            for (kernel, options) in ways() {
                let (o, _) = run(&problem, &inputs, kernel, &options);
                let got = elements(&problem, &o)[last * 8];
                let is_right = if wanted.is_nan() { got.is_nan() } else { (got - wanted).abs() < 1e-5 };
                assert!(is_right, "{shape} {row} {seven} {kernel:?} {options:?}: {got}, not {wanted}");
            }
        }
    }
}

/// A sink is a weight like others, even where it is the only one, infinite or no number.
#[test]
fn sinks_of_every_size() {
    for shape in ["b1h4s40/30d16:causal-br:sinks", "b1h4/1s1/2200d16:sinks"] {
        let problem = problem(shape, DType::F32);
        let inputs = Inputs::generate(&problem, Family::Normal, 7);
        let sinks = [f32::NEG_INFINITY, 200.0, f32::NAN, -3.0];
        let side = SideInputs { sinks: Some(&sinks), ..inputs.side() };
        let mut answers = Vec::new();
        for (kernel, options) in ways() {
            let mut o = Tensor::zeros(problem.o_shape(), DType::F32, Layout::Bhsd);
            let mut lse = vec![0.0; problem.rows()];
            let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
            attention(kernel, &problem, q, k, v, &side, o.view_mut(), Some(&mut lse), &options).unwrap();
            let seq_q = problem.sizes().seq_q;
            for (row, lse) in lse.iter().enumerate() {
                let blind = problem.visible(row % seq_q, seq_q, problem.sizes().seq_kv).is_empty();
                match row / seq_q {
                    0 => assert_eq!(*lse == f32::NEG_INFINITY, blind, "{kernel:?} {options:?} {row}"),
                    1 => assert_eq!(*lse, 200.0, "{kernel:?} {options:?} {row}"),
                    2 => assert!(lse.is_nan(), "{kernel:?} {options:?} {row}"),
                    _ => assert!(*lse >= -3.0 - 1e-6, "{kernel:?} {options:?} {row}"),
                }
            }
            let values = elements(&problem, &o);
            let head = |head: usize| &values[head * seq_q * 16..(head + 1) * seq_q * 16];
            assert!(head(1).iter().all(|x| *x == 0.0) && head(2).iter().all(|x| x.is_nan()), "{kernel:?}");
            answers.push([head(0).to_vec(), head(3).to_vec()].concat());
        }
        for answer in &answers {
            let close = answer.iter().zip(&answers[0]).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "{shape}");
        }
    }
}

/// Each of the 256 codes in K and in V, -128 of i8 included: with one key a sequence, the score is what the key's code stands for, and O what
/// the value's does.
#[test]
fn every_code_is_read_as_its_value() {
    for codes in DType::EIGHT_BIT {
        let shape = format!("b256h1s1/1d1/3:kv={codes}:scales=tensor:o=f32");
        for dtype in [DType::F32, DType::BF16] {
            let problem = problem(&shape, dtype);
            let mut inputs = Inputs::generate(&problem, Family::Normal, 1);
            let one = if dtype == DType::F32 { &[0, 0, 0x80, 0x3F][..] } else { &[0x80, 0x3F][..] };
            inputs.q.bytes_mut().chunks_mut(one.len()).for_each(|q| q.copy_from_slice(one));
            inputs.k.bytes_mut().iter_mut().zip(0..=255).for_each(|(k, code)| *k = code);
            inputs.v.bytes_mut().iter_mut().enumerate().for_each(|(at, v)| *v = (at / 3) as u8);
            let scales = inputs.scales.as_mut().unwrap();
            (scales.k, scales.v) = (vec![0.125], vec![2.0]);
            let mut value = Vec::new();
            for (kernel, options) in ways() {
                let (o, lse) = run(&problem, &inputs, kernel, &options);
                let o = elements(&problem, &o);
                for code in 0..256 {
                    inputs.k.view().row_f64(code, 0, 0, &mut value);
                    let value = value[0];
                    let is = |got: f64, wanted: f64| {
                        got.is_nan() && value.is_nan() || (got - wanted).abs() <= 1e-6 * wanted.abs()
                    };
                    assert!(
                        is(f64::from(lse[code]), 0.125 * value),
                        "{codes} {code} {options:?}: {}",
                        lse[code]
                    );
                    // A score that is no number spoils all of the row.
                    let row = &o[3 * code..3 * code + 3];
                    assert!(row.iter().all(|&o| is(o, 2.0 * value)), "{codes} {code} {options:?}: {row:?}");
                }
            }
        }
    }
}

/// An e4m3 code that is no number spoils what it is multiplied into, and nothing else.
#[test]
fn codes_that_are_no_numbers_stay_where_they_are() {
    for (shape, dim) in [("b1h4/2s1/90d136:kv=e4m3", 136), ("b1h2s20/90d64:kv=e4m3", 64)] {
        let problem = problem(shape, DType::BF16);
        let clean = Inputs::generate(&problem, Family::Normal, 6);
        // One in the first columns, which are read several vectors at a time, and one in the last vector.
        for (key, column) in [(7, 33), (89, dim - 1), (16, 0)] {
            let poisoned = |tensor: &mut Tensor, code| tensor.bytes_mut()[key * dim + column] = code;
            let (mut keys, mut values) = (clean.clone(), clean.clone());
            poisoned(&mut keys.k, 0xFF);
            poisoned(&mut values.v, 0x7F);
            let Sizes { heads_q, heads_kv, seq_q, .. } = problem.sizes();
            let rows = heads_q / heads_kv * seq_q;
            for (kernel, options) in ways() {
                let rows_of = |inputs| elements(&problem, &run(&problem, inputs, kernel, &options).0);
                let [by_keys, by_values] = [rows_of(&keys), rows_of(&values)];
                for at in 0..by_keys.len() {
                    let spoilt = at / dim < rows;
                    assert_eq!(by_keys[at].is_nan(), spoilt, "{shape} {kernel:?} {options:?} K {at}");
                    let spoilt = spoilt && at % dim == column;
                    assert_eq!(by_values[at].is_nan(), spoilt, "{shape} {kernel:?} {options:?} V {at}");
                }
            }
        }
    }
}

/// Side inputs that do not fit are refused before anything is written.
#[test]
fn what_comes_beside_the_tensors_is_checked() {
    let refusal = |shape: &str, change: &dyn Fn(&mut SideInputs<'_>)| {
        let problem = problem(shape, DType::F32);
        let inputs = Inputs::generate(&problem, Family::Normal, 1);
        let mut side = inputs.side();
        change(&mut side);
        let mut o = Tensor::poisoned_gaps(problem.o_shape(), DType::F32, Layout::Bhsd, 0);
        let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        let options = CpuOptions::default();
        let outcome = attention(CpuKernel::Flash, &problem, q, k, v, &side, o.view_mut(), None, &options);
        assert!(o.bytes().iter().all(|byte| *byte == 0xFF), "{shape}");
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Problem(_)), "{shape}: {error}");
        error.to_string()
    };
    assert!(refusal("b2h2s5d8:sinks", &|side| side.sinks = None).contains("sinks"));
    assert!(refusal("b2h2s5d8", &|side| side.alibi_slopes = Some(&[1.0, 2.0])).contains("ALiBi"));
    assert!(refusal("b2h2s5d8:used", &|side| side.seqused_kv = Some(&[6, 1])).contains('6'));
    assert!(refusal("b2h2s5d8:varlen", &|side| side.cu_seqlens_q = Some(&[0, 9, 10])).contains('9'));
    let table = PageTable { entries: &[0, 1, 99, 0, 1, 2], row_stride: 3 };
    assert!(refusal("b2h2s5d8:paged=2", &|side| side.page_table = Some(table)).contains("99"));
}

/// Positions far beyond what an f32 counts exactly, at the end of a long sequence.
#[test]
fn far_positions_keep_their_distance() {
    let problem = problem("b1h2s5/40000d8:window=20/0:alibi", DType::F32);
    assert_eq!(
        problem.mask(),
        Mask::Window { left: Some(20), right: Some(0), alignment: Alignment::BottomRight }
    );
    check(&problem, Family::Normal, 3);
}
