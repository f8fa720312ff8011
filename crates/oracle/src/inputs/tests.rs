use evosdpa_core::{Layout, Shape};

use super::*;

fn problem(text: &str, dtype: DType) -> Problem {
    Problem::new(text.parse::<Shape>().unwrap(), dtype).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let view = tensor.view();
    let [batch, heads, seq, _] = view.shape();
    let mut all = Vec::new();
    let mut row = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                view.row_f64(b, h, s, &mut row);
                all.extend_from_slice(&row);
            }
        }
    }
    all
}

#[test]
fn normal_data_is_normal() {
    let inputs = Inputs::generate(&problem("mission", DType::F32), Family::Normal, 1);
    for tensor in [&inputs.q, &inputs.k, &inputs.v] {
        let data = values(tensor);
        let n = data.len() as f64;
        let mean = data.iter().sum::<f64>() / n;
        let variance = data.iter().map(|x| x * x).sum::<f64>() / n;
        let fourth = data.iter().map(|x| x.powi(4)).sum::<f64>() / n;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02 && (fourth - 3.0).abs() < 0.2);
    }
}

#[test]
fn numbers_depend_on_the_seed_and_not_on_the_layout() {
    let plain = problem("b2h2s5d8", DType::BF16);
    let other = plain.with_layout(Layout::Bshd);
    let first = Inputs::generate(&plain, Family::Normal, 7);
    assert_eq!(values(&first.k), values(&Inputs::generate(&other, Family::Normal, 7).k));
    assert_eq!(values(&first.k), values(&Inputs::with_poisoned_gaps(&other, Family::Normal, 7, 3).k));
    assert_ne!(values(&first.k), values(&Inputs::generate(&plain, Family::Normal, 8).k));
    assert_ne!(values(&first.k), values(&first.q));
}

/// The numbers themselves, so that a change of generator or platform is noticed.
#[test]
fn numbers_are_the_same_on_every_machine() {
    let inputs = Inputs::generate(&problem("tiny", DType::F32), Family::Normal, 0);
    let bits: Vec<u32> = values(&inputs.q)[..4].iter().map(|&x| (x as f32).to_bits()).collect();
    assert_eq!(bits, GOLDEN, "{bits:#010x?}");
}

const GOLDEN: [u32; 4] = [0x3be7_113d, 0x3f1e_3b8d, 0xbf95_6bba, 0x3edb_d409];

#[test]
fn families_are_what_they_say() {
    let problem = problem("b1h2s33d16", DType::F16);
    let draw = |family| Inputs::generate(&problem, family, 3);
    assert!(values(&draw(Family::Zeros).v).iter().all(|&x| x == 0.0));
    assert!(values(&draw(Family::MaxValues).v).iter().all(|&x| x.abs() == 65504.0));
    assert!(values(&draw(Family::Uniform).q).iter().all(|&x| (-1.0..=1.0).contains(&x)));
    assert!(values(&draw(Family::LargeLogits).q).iter().any(|&x| x > 80.0));
    let first = values(&draw(Family::FirstKey).k);
    assert!(first[..16].iter().any(|x| x.abs() > 80.0) && first[16..33 * 16].iter().all(|x| x.abs() < 8.0));
    let denormal = draw(Family::Denormals);
    assert!(values(&denormal.k).iter().any(|&x| x != 0.0 && x.abs() < Float::F16.min_normal()));
    let tied = values(&draw(Family::Ties).k);
    assert_eq!(tied[..16], tied[4 * 16..5 * 16]);
}

/// An average of values of another type than the output's must be one that the output can hold.
#[test]
fn the_largest_values_fit_the_output() {
    for (text, dtype, most) in [
        ("b1h1s9d8:o=f16", DType::BF16, 65280.0),
        ("b1h1s9d8:kv=bf16", DType::F16, 65280.0),
        ("b1h1s9d8:kv=bf16", DType::E4M3, 65280.0),
        ("b1h1s9d8:kv=f32:o=f16", DType::BF16, 65504.0),
    ] {
        let problem = problem(text, dtype);
        let v = values(&Inputs::generate(&problem, Family::MaxValues, 3).v);
        assert!(v.iter().all(|&x| x.abs() == most), "{text} {dtype}: {}", v[0]);
        assert_eq!(Family::MaxValues.value_scale(&problem), most);
    }
}

#[test]
fn keys_that_nobody_sees_are_infinite_and_no_others() {
    for text in [
        "b1h1s3/7d8",
        "b1h1s3/7d8:causal",
        "b1h1s3/7d8:causal-br",
        "b1h1s9/7d8:window-tl=1/0",
        "b1h1s2/7d8:window=1/0",
    ] {
        let problem = problem(text, DType::BF16);
        let keys = values(&Inputs::generate(&problem, Family::HiddenKeys, 1).k);
        let sizes = problem.sizes();
        for (key, row) in keys.chunks(8).enumerate() {
            let seen = (0..sizes.seq_q).any(|i| problem.band().visible(i, sizes.seq_kv).contains(&key));
            assert!(row.iter().all(|x| x.is_finite() == seen), "{text} {key}");
        }
    }
}

#[test]
fn eight_bit_inputs_are_the_originals_quantised() {
    for dtype in DType::EIGHT_BIT {
        let problem = problem("b2h4/2s9/33d16", dtype).with_layout(Layout::Bshd);
        for family in Family::ALL {
            let inputs = Inputs::generate(&problem, family, 3);
            let gapped = Inputs::with_poisoned_gaps(&problem, family, 3, 5);
            let scales = inputs.scales.as_ref().unwrap();
            assert_eq!((scales.q.len(), scales.k.len(), scales.v.len()), (8, 4, 4));
            assert_eq!(gapped.scales.as_ref(), Some(scales));
            let original = Inputs::original(&problem, family, 3, Arrangement::of(family, 3));
            let (back, gapped) = (inputs.dequantized(&problem), gapped.dequantized(&problem));
            for (original, back, gapped, scales, heads) in [
                (&original.q, &back.q, &gapped.q, &scales.q, 4),
                (&original.k, &back.k, &gapped.k, &scales.k, 2),
                (&original.v, &back.v, &gapped.v, &scales.v, 2),
            ] {
                assert_eq!(values(back), values(gapped));
                let [batch, _, seq, dim] = original.view().shape();
                assert_eq!(scales.len(), batch * heads);
                for (i, (x, y)) in values(original).iter().zip(values(back)).enumerate() {
                    // Half a step of u8 and i8, or of the last binade of e4m3.
                    let half_step = match dtype {
                        DType::U8 => 448.0 / 254.0,
                        DType::I8 => 0.5,
                        _ => 16.0,
                    };
                    let allowed = half_step * scales[i / (seq * dim)] as f64;
                    assert!((x - y).abs() <= allowed * 1.000_001, "{dtype} {family} {x} {y}");
                }
            }
        }
    }
    let half = problem("tiny", DType::F16);
    let plain = Inputs::generate(&half, Family::Normal, 1);
    assert!(plain.scales.is_none() && matches!(plain.dequantized(&half), Cow::Borrowed(_)));
}

#[test]
fn eight_bit_denormals_are_subnormal_codes() {
    let codes = |dtype| Inputs::generate(&problem("mission", dtype), Family::Denormals, 3).k;
    let small = |codes: &Tensor| codes.bytes().iter().skip(1).step_by(2).copied().collect::<Vec<u8>>();
    let e4m3 = small(&codes(DType::E4M3));
    assert!((1..8).all(|code| e4m3.contains(&code) && e4m3.contains(&(0x80 | code))));
    assert!(small(&codes(DType::U8)).iter().all(|&code| code == 128));
    assert!(small(&codes(DType::I8)).iter().all(|&code| code == 0));
}

fn arranged(text: &str, lengths: LengthFamily, pages: PageOrder) -> Inputs {
    let arrangement = Arrangement { lengths, pages };
    Inputs::arranged(&problem(text, DType::F32), Family::Normal, 3, None, arrangement)
}

#[test]
fn lengths_are_what_their_family_says() {
    let used = |lengths| arranged("b4h1s2/9d4:used", lengths, PageOrder::InOrder).side.seqused_kv.unwrap();
    assert_eq!(used(LengthFamily::Equal), [9, 9, 9, 9]);
    assert_eq!(used(LengthFamily::Skewed), [9, 4, 2, 1]);
    assert_eq!(used(LengthFamily::WithZeros), [0, 5, 5, 0]);
    assert_eq!(used(LengthFamily::OneToken), [1, 1, 1, 9]);
    let packed = arranged("b3h1s4/9d4:varlen", LengthFamily::WithZeros, PageOrder::InOrder).side;
    assert_eq!(packed.cu_seqlens_q.unwrap(), [0, 2, 4, 4]);
    assert_eq!(packed.cu_seqlens_kv.unwrap(), [0, 0, 5, 10]);
}

#[test]
fn listed_lengths_are_those_of_the_list_and_tensors_have_room_for_no_more() {
    let listed = |text: &str| text.parse::<LengthFamily>().unwrap();
    let given = listed("9,2x1,4");
    let used = arranged("b4h1s2/9d4:used", given, PageOrder::InOrder).side.seqused_kv.unwrap();
    assert_eq!(used, [9, 1, 1, 4]);
    let whole = problem("b4h2/1s5/9d4:varlen", DType::F32);
    let fitted = given.fitted(&whole).unwrap();
    // As many queries as keys, as far as a sequence may have them.
    assert_eq!((fitted.q_shape(), fitted.k_shape()), ([1, 2, 11, 4], [1, 1, 15, 4]));
    assert_eq!((fitted.rows(), fitted.to_string()), (22, whole.to_string()));
    let inputs = Inputs::arranged(&fitted, Family::Normal, 3, None, Arrangement::timed(given));
    assert_eq!(inputs.side.cu_seqlens_q.as_deref().unwrap(), [0, 5, 6, 7, 11]);
    assert_eq!(inputs.side.cu_seqlens_kv.as_deref().unwrap(), [0, 9, 10, 11, 15]);
    assert!(values(&inputs.q).iter().chain(&values(&inputs.k)).all(|x| x.is_finite()));
    // Others are drawn to fit, whichever they are; and a list of empty sequences leaves room for some.
    for fitted in [fitted, listed("4x0").fitted(&whole).unwrap()] {
        for lengths in LengthFamily::ALL {
            let side = Inputs::arranged(&fitted, Family::Normal, 3, None, Arrangement::timed(lengths)).side;
            let tokens = [side.cu_seqlens_q.unwrap()[4], side.cu_seqlens_kv.unwrap()[4]];
            assert!(tokens[0] as usize <= fitted.q_shape()[2] && tokens[1] as usize <= fitted.k_shape()[2]);
        }
    }
    for (lengths, words) in [("3x2", "of 3 sequences, and the problem has 4"), ("4x10", "longest has 9")] {
        let error = listed(lengths).fitted(&whole).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(lengths), "{error}");
    }
}

#[test]
fn pages_lie_as_their_order_says() {
    let table = |pages| arranged("b2h1s1/5d4:paged=2", LengthFamily::Equal, pages).side.page_table.unwrap();
    assert_eq!(table(PageOrder::InOrder), [0, 1, 2, 3, 4, 5]);
    assert_eq!(table(PageOrder::Reversed), [5, 4, 3, 2, 1, 0]);
    assert_eq!(table(PageOrder::SharedPrefix), [0, 1, 2, 0, 4, 5]);
    let mut random = table(PageOrder::Random);
    assert_ne!(random, [0, 1, 2, 3, 4, 5]);
    random.sort_unstable();
    assert_eq!(random, [0, 1, 2, 3, 4, 5]);
    // A page that nobody has, and the place behind the fifth key, hold NaN.
    let shared = arranged("b2h1s1/5d4:paged=2", LengthFamily::Equal, PageOrder::SharedPrefix);
    let nan: Vec<bool> = values(&shared.k).chunks(4).map(|row| row.iter().all(|x| x.is_nan())).collect();
    assert_eq!(nan.iter().filter(|&&nan| nan).count(), 4);
    assert!(nan[5] && nan[6] && nan[7] && nan[11], "{nan:?}");
}

#[test]
fn arrangements_differ_from_case_to_case() {
    let mut seen = std::collections::HashSet::new();
    for family in Family::ALL {
        for seed in 0..5 {
            seen.insert(Arrangement::of(family, seed));
        }
    }
    assert_eq!(seen.len(), 16);
}
