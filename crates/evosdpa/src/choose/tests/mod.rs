use std::collections::BTreeMap;

use evosdpa_kernels::{Arch, Assignment};

mod codes;
mod golden;
mod random;

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
    assert_eq!(kernel("b4h32/8s1/4096d128", DType::BF16, Arch::Sm90a), "hopper_small");
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89] {
        assert_eq!(kernel("long:causal", DType::F16, arch), "ampere_fwd");
    }
    assert_eq!(kernel("mission", DType::U8, Arch::Sm90a), "sdpa_fp8_stage_c");
}

#[test]
fn tensors_that_the_copy_engine_cannot_reach_go_to_a_kernel_that_can() {
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
    let message = choose("b1h8s512d512", DType::F16, Arch::Sm89, |_| {}).unwrap_err().to_string();
    assert!(message.contains("the closest is") && message.contains("head_dim is 512"), "{message}");
    let message = choose("mission", DType::F32, Arch::Sm90a, |_| {}).unwrap_err().to_string();
    assert!(message.contains("the closest is") && message.contains("not f32"), "{message}");
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

/// The choice is within 3 % of the best kernel in every measurement the built-in table rests on.
#[test]
fn the_table_that_is_built_in_chooses_what_was_fastest() {
    let planner = embedded();
    let mut problems = 0;
    for file in ["hopper-named.json", "bench-named-shapes.json", "planner-boundary.json"] {
        let path = format!("{}/../../results/h200/{file}", env!("CARGO_MANIFEST_DIR"));
        let document: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut measured: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
        for row in document["rows"].as_array().unwrap().iter().filter(|row| row["peer"] == false) {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            let Some(p50_us) = row["p50_us"].as_f64() else { continue };
            measured.entry(text("problem")).or_default().insert(text("kernel"), p50_us);
        }
        for (problem, times_us) in measured {
            let (shape, dtype) = problem.split_once(' ').unwrap();
            let h200 = (Arch::Sm90a, Some("NVIDIA H200"));
            let choice = choose_with(&planner, shape, dtype.parse().unwrap(), h200, |_| {}).unwrap();
            let best_us = times_us.values().copied().fold(f64::INFINITY, f64::min);
            let chosen_us = times_us[&choice.variant.id.kernel];
            assert!(
                chosen_us <= 1.03 * best_us,
                "{problem}: {} takes {chosen_us} of {times_us:?}",
                choice.origin
            );
            assert!(matches!(choice.origin, Origin::Row { .. }), "{problem}: {}", choice.origin);
            problems += 1;
        }
    }
    assert!(problems >= 20, "{problems}");
}
