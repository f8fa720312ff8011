use evosdpa_core::DType;
use evosdpa_kernels::{Arch, Assignment};

mod codes;
mod golden;
mod random;
mod speed;

use super::*;

fn rules() -> Planner {
    Planner::new(Registry::embedded().unwrap())
}

fn embedded() -> Planner {
    rules().and_table(TunedTable::embedded().unwrap())
}

fn choose_with(
    planner: &Planner,
    text: &str,
    dtype: DType,
    (arch, device): (Arch, Option<&str>),
    change: impl Fn(&mut DeviceTensors),
) -> Result<Choice, Error> {
    let problem = Problem::new(text.parse().unwrap(), dtype).unwrap();
    let mut tensors = assumed_tensors(&problem);
    change(&mut tensors);
    let target = Target::nominal(arch);
    planner.choose(&Question { problem: &problem, tensors: &tensors, target: &target, device })
}

fn choose(
    text: &str,
    dtype: DType,
    arch: Arch,
    change: impl Fn(&mut DeviceTensors),
) -> Result<Choice, Error> {
    choose_with(&rules(), text, dtype, (arch, None), change)
}

fn kernel(text: &str, dtype: DType, arch: Arch) -> String {
    choose(text, dtype, arch, |_| {}).unwrap().variant.id.kernel
}

#[test]
fn every_architecture_has_its_kernels() {
    assert_eq!(kernel("mission", DType::BF16, Arch::Sm90a), "hopper_small");
    assert_eq!(kernel("long:causal", DType::F16, Arch::Sm90a), "hopper_fwd");
    assert_eq!(kernel("b4h32/8s1/512d128", DType::BF16, Arch::Sm90a), "hopper_small");
    assert_eq!(kernel("b4h32/8s1/4096d128", DType::BF16, Arch::Sm90a), "flash_decode");
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89] {
        assert_eq!(kernel("long:causal", DType::F16, arch), "ampere_fwd");
    }
    assert_eq!(kernel("mission", DType::U8, Arch::Sm90a), "sdpa_fp8_stage_c");
}

#[test]
fn tensors_that_tma_cannot_reach_go_to_a_kernel_that_can() {
    type Change = fn(&mut DeviceTensors);
    let changes: [(Change, &str); 3] = [
        (|t| t.q.address += 2, "no tensor map for Q: its address"),
        (|t| t.k.strides[2] += 1, "no tensor map for K: its sequence stride of 65"),
        (|t| t.v.strides[1] = 0, "no tensor map for V: its head stride of 0"),
    ];
    for planner in [rules(), embedded()] {
        for (change, why) in changes {
            let choice =
                choose_with(&planner, "long", DType::F16, (Arch::Sm90a, Some("NVIDIA H200")), change)
                    .unwrap();
            assert_eq!(choice.variant.id.kernel, "ampere_fwd");
            let hopper = choice.others.iter().find(|other| other.id.kernel == "hopper_fwd").unwrap();
            assert!(hopper.why.contains(why), "{hopper:?}");
        }
    }
    // 36 elements of 2 bytes are no multiple of 16 bytes.
    assert_eq!(kernel("b1h8s512d36", DType::F16, Arch::Sm90a), "ampere_fwd");
}

#[test]
fn a_problem_nobody_takes_names_who_comes_closest() {
    let message = choose("b1h8s512d512", DType::F32, Arch::Sm89, |_| {}).unwrap_err().to_string();
    assert!(message.contains("the closest is `ampere_f32`: head_dim is 512, it takes 1 to 256"), "{message}");
    let message = choose("mission:kv=f16", DType::F32, Arch::Sm90a, |_| {}).unwrap_err().to_string();
    assert!(message.contains("the closest is `ampere_f32`: it does not take"), "{message}");
}

#[test]
fn wide_heads_and_f32_have_a_kernel_everywhere() {
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a] {
        let limit = Target::nominal(arch).smem_limit_bytes;
        let wide = if arch == Arch::Sm90a { "hopper_wide" } else { "ampere_fwd" };
        for (shape, dtype, name) in [
            ("b4h8s4096d512:causal", DType::BF16, wide),
            ("b4h8/2s4096d320/64:window=500/0", DType::F16, wide),
            ("b4h8s4096d64/272:precise", DType::BF16, wide),
            ("b4h8s4096d512:softcap=30", DType::BF16, "ampere_fwd"),
            // rows that TMA cannot describe
            ("b4h8s4096d257", DType::F16, "ampere_fwd"),
            ("b1h8s1/9000d512:used:paged=16", DType::BF16, "ampere_fwd"),
            ("b4h8s1000d64/512:varlen:alibi:sinks", DType::F16, "ampere_fwd"),
            ("b4h8s4096d64:causal", DType::F32, "ampere_f32"),
            ("b4h8s4096d256", DType::F32, "ampere_f32"),
            ("b1h8s1/9000d128:used:paged=16:precise", DType::F32, "ampere_f32"),
            ("b4h8s1000d200/8:causal-br:varlen:softcap=30:bias:mask=b:sinks", DType::F32, "ampere_f32"),
        ] {
            let variant = choose(shape, dtype, arch, |_| {}).unwrap().variant;
            assert_eq!(variant.id.kernel, name, "{shape} on {arch}");
            assert!(variant.launch.dynamic_smem_bytes <= limit, "{shape} on {arch}: {}", variant.label());
        }
    }
}

const TABLE: &str = r#"
    schema = 1
    [[device]]
    arch = "sm_90a"
    name = "NVIDIA H200"
    row = [
        { shape = "mission", kernel = "hopper_fwd", tunables = { CONSUMERS = 1 }, why = "for the test", p50_us = 4.5 },
        { shape = "small", kernel = "gone" },
        { shape = "small", kernel = "hopper_small", tunables = { GONE = 1 } },
        { shape = "small", kernel = "hopper_small", tunables = { WG_N = 4, WG_M = 2 } },
        { shape = "small", kernel = "ampere_fwd" },
    ]
"#;

#[test]
fn rows_come_before_rules_and_say_where_they_stand() {
    let planner = rules().and_table(TunedTable::parse(TABLE, "t.toml").unwrap());
    let h200 = (Arch::Sm90a, Some("NVIDIA H200"));
    let choice = choose_with(&planner, "mission", DType::BF16, h200, |_| {}).unwrap();
    assert_eq!(choice.variant.id.kernel, "hopper_fwd");
    assert_eq!(choice.variant.id.tunables.value("CONSUMERS"), Some(1));
    let expected = "row 1 of NVIDIA H200 (sm_90a) in t.toml, for problems like mission";
    assert_eq!(choice.origin.to_string(), expected);
    // Other devices of the architecture use the row too; other architectures do not.
    let h100 = (Arch::Sm90a, Some("NVIDIA H100 80GB HBM3"));
    assert_eq!(
        choose_with(&planner, "mission", DType::BF16, h100, |_| {}).unwrap().variant.id.kernel,
        "hopper_fwd"
    );
    let l4 = (Arch::Sm89, Some("NVIDIA L4"));
    assert_eq!(
        choose_with(&planner, "mission", DType::BF16, l4, |_| {}).unwrap().variant.id.kernel,
        "ampere_fwd"
    );
}

#[test]
fn rows_that_cannot_are_passed_over_with_the_reason() {
    let planner = rules().and_table(TunedTable::parse(TABLE, "t.toml").unwrap());
    let h200 = (Arch::Sm90a, Some("NVIDIA H200"));
    let choice = choose_with(&planner, "small", DType::BF16, h200, |_| {}).unwrap();
    assert_eq!(choice.variant.id.kernel, "ampere_fwd");
    let whys: Vec<&str> = choice.others.iter().map(|other| other.why.as_str()).collect();
    assert!(whys[0].contains("no kernel `gone`"), "{whys:?}");
    assert!(whys[1].contains("no tunable `GONE`"), "{whys:?}");
    assert!(whys[2].contains("at most four warpgroups"), "{whys:?}");
    assert_eq!(whys[3], "something better is there", "{whys:?}");
    assert!(whys[whys.len() - 1].contains("it reads u8, e4m3, not bf16"), "{whys:?}");
}

#[test]
fn earlier_tables_come_first() {
    let row = |kernel: &str| {
        let text = format!(
            "schema = 1\n[[device]]\narch = \"sm_89\"\nrow = [{{ when = \"1\", kernel = \"{kernel}\" }}]\n"
        );
        TunedTable::parse(&text, "t.toml").unwrap()
    };
    let planner = rules().and_table(row("sdpa_v2c")).and_table(row("sdpa_v2b"));
    let choice = choose_with(&planner, "mission", DType::F16, (Arch::Sm89, None), |_| {}).unwrap();
    assert_eq!(choice.variant.id.kernel, "sdpa_v2c");
}

#[test]
fn every_decision_has_its_reason_and_what_is_set_comes_first() {
    let planner = rules();
    let concerns = |shape: &str| {
        let choice = choose_with(&planner, shape, DType::BF16, (Arch::Sm90a, None), |_| {}).unwrap();
        let settings = choice.settings;
        let decided: Vec<&str> = settings.reasons().map(|(reason, _)| reason.concern).collect();
        for (reason, values) in settings.reasons() {
            assert!(!values.is_empty(), "{reason:?}");
            for (name, value) in values {
                let variant = &choice.variant;
                let now = variant.id.tunables.value(name).or_else(|| variant.defines.get(*name).copied());
                assert_eq!(now, Some(*value), "{name} of {shape}");
            }
        }
        decided.join(" ")
    };
    assert_eq!(concerns("mission"), "split tile pipeline PDL mask code precision");
    assert_eq!(concerns("long"), "tile schedule packing pipeline softmax registers mask code precision");
    assert_eq!(concerns("b1h8s512d36"), "tile pipeline registers schedule precision");
    assert_eq!(kernel("b1h8s512d36", DType::BF16, Arch::Sm90a), "ampere_fwd");

    // Kinds follow from the tunables as they are: 512 keys are eight tiles of 64, four for each of two parts.
    let registry = planner.registry();
    let problem = Problem::new("mission".parse().unwrap(), DType::BF16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let target = Target::nominal(Arch::Sm90a);
    let kernel = registry.kernel("hopper_small").unwrap();
    let of = |set: &[(&str, i64)]| {
        let variant = variant(kernel, &facts, &target, &set.iter().copied().collect()).unwrap();
        ["WHOLE_TILES", "OWN_TILES", "LOOP"].map(|name| variant.defines[name])
    };
    assert_eq!(of(&[]), [1, 2, 0]);
    assert_eq!(of(&[("BLOCK_N", 64)]), [0, 0, 1]);
    assert_eq!(of(&[("CTAS_PER_SM", 2)]), [1, 2, 0]);
    // Only tunables can be set.
    let message =
        variant(kernel, &facts, &target, &[("LOOP", 1)].into_iter().collect()).unwrap_err().to_string();
    assert!(message.contains("no tunable `LOOP`"), "{message}");
}

#[test]
fn defaults_give_way_to_constraints() {
    let registry = Registry::embedded().unwrap();
    let problem = Problem::new("b1h8s512d64".parse().unwrap(), DType::F16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let kernel = registry.kernel("fa_s512_v3").unwrap();
    let with = |smem_limit_bytes| {
        let target = Target { smem_limit_bytes, ..Target::nominal(Arch::Sm89) };
        variant(kernel, &facts, &target, &Assignment::default())
    };
    let usual = with(99 << 10).unwrap();
    assert_eq!(usual.id.tunables.value("CONFIG"), Some(9));
    // Less shared memory than the default wants: the first configuration that fits.
    let smaller = with(usual.launch.dynamic_smem_bytes - 1).unwrap();
    assert_ne!(smaller.id.tunables.value("CONFIG"), Some(9));
    assert!(smaller.launch.dynamic_smem_bytes < usual.launch.dynamic_smem_bytes);
    let message = with(1024).unwrap_err().to_string();
    assert!(
        message.contains("not supported by `fa_s512_v3`") && message.contains("no tunable values"),
        "{message}"
    );
}

#[test]
fn a_family_that_there_is_not_is_refused_by_name() {
    let mut registry = Registry::embedded().unwrap();
    let kernel = registry.kernel("sdpa_v1").unwrap().clone();
    let folder = tempfile::tempdir().unwrap();
    let text = kernel.manifest_text.replace("name = \"sdpa_v1\"", "name = \"mine\"\nfamily = \"hoper_fwd\"");
    std::fs::write(folder.path().join("mine.toml"), text).unwrap();
    std::fs::write(folder.path().join("sdpa_v1.cu"), &*kernel.source).unwrap();
    registry.add_folder(folder.path()).unwrap();
    let problem = Problem::new("mission".parse().unwrap(), DType::F16).unwrap();
    let (facts, target) = (ProblemFacts::try_from(&problem).unwrap(), Target::nominal(Arch::Sm89));
    let chosen = variant(registry.kernel("mine").unwrap(), &facts, &target, &Assignment::default());
    let message = chosen.unwrap_err().to_string();
    assert!(message.contains("`hoper_fwd`") && message.contains("hopper_fwd, hopper_small"), "{message}");
}

#[test]
fn high_precision_is_a_second_pv_for_every_row() {
    let precise_keys = |text: &str, dtype, arch| {
        let variant = choose(text, dtype, arch, |_| {}).unwrap().variant;
        (variant.id.kernel, variant.defines["PRECISE_KEYS"])
    };
    for (text, arch, kernel) in [
        ("mission", Arch::Sm90a, "hopper_small"),
        ("mission:causal", Arch::Sm90a, "hopper_small"),
        ("b4h32/8s1/512d128", Arch::Sm90a, "hopper_small"),
        ("b4h32/8s1/4096d128", Arch::Sm90a, "flash_decode"),
        ("long:causal", Arch::Sm90a, "hopper_fwd"),
        ("long128", Arch::Sm90a, "hopper_fwd"),
        ("long128", Arch::Sm89, "ampere_fwd"),
    ] {
        let asked = format!("{text}:precise");
        assert_eq!(precise_keys(&asked, DType::BF16, arch), (kernel.to_owned(), 1 << 30), "{asked}");
        assert!(precise_keys(text, DType::BF16, arch).1 <= 256, "{text}");
        // f16 keeps P to 11 bits.
        assert_eq!(precise_keys(&asked, DType::F16, arch).1, 0, "{asked}");
    }
    // What is not taken is still refused by name.
    let refused = choose("mission:o=f32", DType::BF16, Arch::Sm90a, |_| {}).unwrap_err().to_string();
    assert!(refused.contains("does not take a type of its own for the output"), "{refused}");
}

/// A bias or a mask needs no second PV where every row sees 1,024 keys; beside a cap or slopes hopper_fwd finds out where it does.
#[test]
fn modified_scores_are_precise_where_few_keys_count() {
    let precise_keys =
        |text: &str, dtype, arch| choose(text, dtype, arch, |_| {}).unwrap().variant.defines["PRECISE_KEYS"];
    for (arch, found) in [(Arch::Sm89, 1 << 30), (Arch::Sm90a, 256)] {
        for (kind, full, short, causal) in [
            ("softcap=30", found, found, found),
            ("bias=h", 0, 1 << 30, 1 << 30),
            ("mask=b", 0, 1 << 30, 1 << 30),
            ("alibi", found, found, found),
        ] {
            for (shape, keys) in [("long128", full), ("b2h8s512d128", short), ("long128:causal", causal)] {
                let asked = format!("{shape}:{kind}");
                assert_eq!(precise_keys(&asked, DType::BF16, arch), keys, "{asked}");
                assert_eq!(precise_keys(&format!("{asked}:precise"), DType::BF16, arch), 1 << 30, "{asked}");
                assert_eq!(precise_keys(&asked, DType::F16, arch), 0, "{asked}");
            }
        }
        // Rows may see few keys, and the device finds out which.
        for kind in ["varlen", "used", "chunk=512"] {
            assert_eq!(precise_keys(&format!("long128:{kind}"), DType::BF16, arch), 256, "{kind}");
        }
        assert_eq!(precise_keys("long128:sinks", DType::BF16, arch), 0);
    }
}

/// Caches of their own kinds, changed scores, and dense caches that are large, whatever else the tables say.
#[test]
fn decoding_from_a_cache_takes_the_kernel_that_splits_it() {
    let planner = embedded();
    for shape in [
        "b16h32/8s1/8192d128:used:paged=16",
        "b1h32/8s16/300d64:causal-br:used",
        "b16h32/8s1/8192d128:kv=e4m3:scales=token",
        "b64h8/1s1/2048d256:paged=1",
        "b4h32/8s2/500d128:leftpad:indexed",
        "b4h32/8s1/500d128:softcap=30",
        "b4h32/8s1/4096d128:mask=b",
        "b16h32/8s1/8192d128",
        "b128h64/8s1/1024d128",
        "b1h32/8s1/131072d128",
        "b1h32/8s1/1024d128",
        "b1h64/8s2/8192d128",
    ] {
        for (arch, device) in [(Arch::Sm90a, Some("NVIDIA H200")), (Arch::Sm90a, None), (Arch::Sm80, None)] {
            let choice = choose_with(&planner, shape, DType::BF16, (arch, device), |_| {}).unwrap();
            assert_eq!(choice.variant.id.kernel, "flash_decode", "{shape} on {arch}");
        }
    }
    let kernel = |shape, arch| {
        choose_with(&planner, shape, DType::BF16, (arch, None), |_| {}).unwrap().variant.id.kernel
    };
    // Dense caches of fewer keys, for more rows, without groups, or with a mask.
    for shape in
        ["b1h32/8s1/1023d128", "b4h32s1/4096d128", "b16h32/8s8/8192d128", "b16h32/8s1/8192d128:window=1000/0"]
    {
        assert_eq!(kernel(shape, Arch::Sm90a), "hopper_small", "{shape}");
    }
    // Prompts against a cache, too long for decoding; codes are read by nothing else.
    assert_eq!(kernel("b4h32/8s512/8192d128:used:paged=16", Arch::Sm90a), "hopper_fwd");
    assert_eq!(kernel("b4h32/8s512/8192d128:used:kv=e4m3", Arch::Sm90a), "flash_decode");
}
