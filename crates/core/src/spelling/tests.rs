use proptest::prelude::*;

use super::*;
use crate::{Float, Lengths, Scores, Types};

#[test]
fn text_prints_back_the_same() {
    for text in [
        "tiny",
        "mission",
        "mission:causal",
        "long128:causal-br",
        "b2h8s2048d128",
        "b2h32/8s1/8192d128",
        "b1h1s7/9d192/128:window=255/0",
        "small:window=3/inf",
        "small:window-tl=inf/2",
        "b4h32/8s1/8192d128:paged=16",
        "b4h32/8s1/8192d128:varlen=q:used:paged=1",
        "small:causal-br:varlen",
        "small:varlen=kv:used",
        "b4h2s5/9d8:used:used-q:leftpad:indexed:paged=4",
        "small:softcap=30",
        "small:softcap=0.5:alibi:bias:mask=bh:chunk=64:sinks",
        "small:bias=h:mask=k",
        "small:mask:blocks=128",
        "small:blocks=bh64/256:chunk=64",
        "small:bias=bk:kv=e4m3:o=f32:scales=token",
        "mission:precise",
        "mission:invariant",
    ] {
        assert_eq!(text.parse::<Shape>().unwrap().to_string(), text);
    }
}

#[test]
fn names_mean_their_sizes() {
    assert_eq!("mission".parse::<Shape>().unwrap(), "b1h8s512d64".parse::<Shape>().unwrap());
    let decode = "b2h32/8s1/8192d128".parse::<Shape>().unwrap().sizes();
    assert_eq!((decode.heads_q, decode.heads_kv, decode.seq_q, decode.seq_kv), (32, 8, 1, 8192));
}

#[test]
fn errors_name_the_value_and_the_cure() {
    assert_eq!(crate::HEAD_DIMS, format!("from 1 to {}", crate::MAX_HEAD_DIM));
    for (text, expected) in [
        ("misson", "did you mean `mission`"),
        ("huge", "no shape named `huge`"),
        ("b0h8s512d64", "batch is 0"),
        ("b1h8s512d513", "head dimension is 513, but must be from 1 to 512"),
        ("b1h8/3s512d64", "multiple"),
        ("b-1h8s512d64", "found `-1h8s512`"),
        ("b1h8s512", "`d` and a number are missing"),
        ("b1h8s512d64x", "`x` is left over"),
        ("b1h99999999999999999999s1d1", "too large"),
        ("b1/2h8s512d64", "the batch has one size"),
        ("mission:casual", "did you mean `:causal`"),
        ("mission:causal:causal-br", "second mask"),
        ("mission:softcap=30:softcap=20", "`:softcap` is there twice"),
        ("mission:softcap", "did you mean `:softcap=30`"),
        ("mission:softcap=0", "softcap is 0, but must be a positive finite number"),
        ("mission:softcap=high", "found `high`"),
        ("mission:paged=257", "page size is 257, but must be from 1 to 256"),
        ("mission:paged=-1", "`:paged=` takes a positive whole number, found `-1`"),
        ("mission:varlen=k", "`:varlen=` packs `q` or `kv`, found `k`"),
        ("mission:varlen:paged=16", "write :varlen=q to pack the queries alone"),
        ("mission:bias=q", "`b` each sequence"),
        ("mission:bias=", "found ``"),
        ("mission:mask=hb", "found `hb`"),
        ("mission:blocks=96", "query block is 96, but must be a multiple of 64"),
        ("mission:blocks=h64/0", "key block is 0"),
        ("mission:blocks=q64", "`:blocks=` takes a positive whole number, found `q64`"),
        ("mission:pagd=3", "did you mean `:paged=16`"),
        ("mission:blocks", "did you mean `:blocks=128`"),
        ("mission:chunk=0", "attention chunk is 0"),
        ("mission:kv=e5m2", "unknown dtype `e5m2`"),
        ("mission:o=u8", "an output is f32, f16 or bf16, found `u8`"),
        ("mission:scales=row", "unknown granularity of scales `row`"),
        ("mission:alibi=8", "did you mean `:alibi`"),
        ("mission:sink", "did you mean `:sinks`"),
        ("mission:window=3", "left/right"),
        ("mission:window=-1/0", "found `-1`"),
        ("", "no shape named ``"),
    ] {
        let message = text.parse::<Shape>().unwrap_err().to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn a_bad_entry_fails_the_whole_list() {
    assert_eq!(Shape::parse_list("mission, long:causal").unwrap().len(), 2);
    assert!(Shape::parse_list("mission,,long").is_err());
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
        if let Ok(shape) = text.parse::<Shape>() {
            prop_assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
        }
    }

    #[test]
    fn any_valid_shape_prints_and_reads_back(
        batch in 1usize..9, heads_kv in 1usize..9, group in 1usize..5,
        seq_q in 1usize..5000, seq_kv in 1usize..5000, dim_qk in 1usize..=512, dim_v in 1usize..=512,
    ) {
        let sizes = Sizes { batch, heads_q: heads_kv * group, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let shape = Shape::new(sizes, Mask::Causal(Alignment::BottomRight)).unwrap();
        prop_assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
    }

    #[test]
    fn any_kinds_print_and_read_back(
        lengths in (any::<bool>(), any::<bool>(), any::<bool>(), proptest::option::of(1usize..=256)),
        rooms in (any::<bool>(), any::<bool>(), any::<bool>()),
        scores in (proptest::option::of(1e-3f32..1e9), any::<bool>(), any::<bool>()),
        bias in proptest::option::of((any::<bool>(), any::<bool>(), any::<bool>())),
        mask in proptest::option::of((any::<bool>(), any::<bool>(), any::<bool>())),
        chunk in proptest::option::of(1usize..100_000),
        blocks in proptest::option::of((1usize..100, 1usize..100, any::<bool>(), any::<bool>())),
        types in (proptest::option::of(0usize..6), proptest::option::of(0usize..3), 0usize..3, any::<bool>(), any::<bool>()),
    ) {
        let (packed_queries, packed_keys, used, page) = lengths;
        let broadcast = |(batch, heads, queries)| Broadcast { batch, heads, queries };
        let dtypes = DType::ALL;
        let kinds = Kinds {
            lengths: Lengths {
                packed_queries,
                packed_keys: packed_keys && page.is_none(),
                used,
                used_queries: rooms.0,
                left_padded: rooms.1,
                indexed: rooms.2 && !(packed_keys && page.is_none()),
                page: page.map(|tokens| PageSize::new(tokens).unwrap()),
            },
            scores: Scores {
                softcap: scores.0.map(|cap| Softcap::new(cap).unwrap()),
                alibi: scores.1,
                bias: bias.map(broadcast),
                mask: mask.map(broadcast),
                blocks: blocks.map(|(q, kv, batch, heads)| Blocks::new(64 * q, 64 * kv, batch, heads).unwrap()),
                chunk: chunk.map(|keys| Chunk::new(keys).unwrap()),
                sinks: scores.2,
            },
            types: Types {
                kv: types.0.map(|i| dtypes[i]),
                output: types.1.map(|i| Float::ALL[i]),
                scales: Granularity::ALL[types.2],
            },
            precision: if types.3 { Precision::High } else { Precision::Default },
            batch_invariant: types.4,
        };
        let shape = Shape::new(Sizes::square(1, 2, 3, 4), Mask::Full).unwrap().with_kinds(kinds).unwrap();
        prop_assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
    }
}
