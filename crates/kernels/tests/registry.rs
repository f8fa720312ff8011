//! Manifests, variants and support rules, on a fixture kernel.

use std::{fs, path::Path};

use evosdpa_core::DType;
use evosdpa_kernels::{Arch, Error, Gate, Kernel, Manifest, ProblemFacts, Registry, SpaceSize, Target};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny");

fn manifest_text() -> String {
    fs::read_to_string(Path::new(FIXTURE).join("scale_rows.toml")).unwrap()
}

fn registry() -> Registry {
    let mut registry = Registry::default();
    registry.add_folder(Path::new(FIXTURE)).unwrap();
    registry
}

fn kernel() -> Kernel {
    registry().kernel("scale_rows").unwrap().clone()
}

fn facts() -> ProblemFacts {
    ProblemFacts {
        batch: 2,
        heads_q: 8,
        heads_kv: 8,
        seq_q: 100,
        seq_kv: 100,
        head_dim: 60,
        value_dim: 60,
        dtype: DType::F16,
        kv_dtype: DType::F16,
        band_lo: None,
        band_hi: None,
        lse: false,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    }
}

/// The error of the manifest with one piece of text replaced.
fn error_with(from: &str, to: &str) -> String {
    let text = manifest_text();
    assert!(text.contains(from), "{from}");
    Manifest::parse(&text.replacen(from, to, 1), "k.toml").unwrap_err().to_string()
}

fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn embedded_kernels_and_mutants_are_readable() {
    let registry = Registry::embedded().unwrap();
    for kernel in registry.kernels() {
        assert!(kernel.manifest.mutant.is_none());
    }
    for mutant in registry.mutants() {
        assert!(mutant.manifest.mutant.is_some());
        assert_eq!(mutant.source_file, format!("mutants/{}.cu", mutant.name()));
        assert!(!registry.kernels().any(|kernel| kernel.name() == mutant.name()), "{}", mutant.name());
    }
}

#[test]
fn errors_name_the_file_the_key_and_the_nearest_name() {
    let message = error_with("[launch]\nblock", "[launch]\nblok");
    assert_contains(&message, &["k.toml:18:1", "unknown key `blok`", "`grid`", "did you mean `block`?"]);
    let message = error_with("tolerance = \"half\"", "tolerance = \"hlaf\"");
    assert_contains(&message, &["k.toml:7:", "`hlaf`", "`eight_bit`", "did you mean `half`?"]);
    let message = error_with("[tunable.micro.", "[tunable.mirco.");
    assert_contains(&message, &["`mirco`", "did you mean `micro`?"]);
    assert_contains(
        &error_with("[limits.sm_80]\nregisters", "[limits.sm_80]\nregs"),
        &["`regs`", "`registers`"],
    );
    assert_contains(&error_with("entry = \"scale_rows\"\n", ""), &["k.toml", "missing field `entry`"]);
    assert_contains(&error_with("gqa = true", "gqa = 3"), &["k.toml:14:7", "boolean"]);
    assert_contains(
        &error_with("\"sm_89\", \"sm_90a\"]", "\"sm_89\", \"sm_90b\"]"),
        &["k.toml:6", "sm_90b", "sm_90a"],
    );
    let unknown = error_with("dtypes = [\"f16\"]", "dtypes = [\"fp16\"]");
    assert_contains(&unknown, &["k.toml:10", "fp16", "`f16`"]);
    assert_eq!(unknown.matches("did you mean").count(), 1, "{unknown}");
    assert_contains(&error_with("schema = 1", "schema = 2"), &["`schema`", "2 is not known"]);
    assert_contains(&error_with("schema = 1", "schema = "), &["k.toml:1:"]);
}

#[test]
fn impossible_manifests_are_refused() {
    assert_contains(
        &error_with("default = 32", "default = 33"),
        &["tunable.macro.ROWS", "33", "[16, 32, 64]"],
    );
    assert_contains(&error_with("[16, 32, 64]", "[]"), &["tunable.macro.ROWS", "at least one"]);
    assert_contains(&error_with("[16, 32, 64]", "[16, 32, 16]"), &["16 is listed twice"]);
    assert_contains(
        &error_with("{ min = 1, max = 128 }", "{ min = 9, max = 8 }"),
        &["problem.head_dim", "one_of"],
    );
    assert_contains(&error_with("name = \"scale_rows\"", "name = \"scale rows\""), &["`name`", "letters"]);
    assert_contains(&error_with("[tunable.macro.ROWS]", "[tunable.macro.seq_q]"), &["`seq_q` is already"]);
    assert_contains(&error_with("IS_CAUSAL =", "ROWS ="), &["ROWS", "defined twice"]);
    assert_contains(
        &error_with("THREADS <= ROWS * 8", "THREADS > ROWS * 99"),
        &["constraint", "no tunable values satisfy `THREADS > ROWS * 99`", "something to do"],
    );
    assert_contains(
        &error_with("\"causal\"\n\n[tunable", "\"HEAD_DIM2\"\nHEAD_DIM2 = \"IS_CAUSAL + 1\"\n\n[tunable"),
        &["depends on itself", "HEAD_DIM2 → IS_CAUSAL"],
    );
    assert_contains(&error_with("[limits.sm_80]", "[limits.sm_86]"), &["limits.sm_86", "not among `archs`"]);
}

#[test]
fn expressions_are_checked_when_the_manifest_is_read() {
    let message = error_with("ceil_div(seq_q, ROWS)", "ceil_div(seq_q, ROWZ)");
    assert_contains(&message, &["launch.grid.x", "column 17", "there is no `ROWZ`", "did you mean `ROWS`?"]);
    let message =
        error_with("ROWS * HEAD_DIM * dtype_bytes\"\n\n[defines]", "ROWS * (HEAD_DIM\"\n\n[defines]");
    assert_contains(&message, &["k.toml:20:16", "`)` expected", "column 17"]);
}

/// What a launch leaves to a thread follows from how many there are: one limit for all variants would refuse those that have
/// more by design, or let the others spill.
#[test]
fn limits_on_registers_follow_the_variant() {
    let registry = Registry::embedded().unwrap();
    let kernel = registry.kernel("hopper_fwd").unwrap();
    let target = Target::nominal(Arch::Sm90a);
    let facts = ProblemFacts { dtype: DType::BF16, head_dim: 64, value_dim: 64, ..facts() };
    for (consumers, ctas_per_sm, registers) in [(1, 1, 255), (2, 1, 168), (1, 2, 128)] {
        let tunables = [("CONSUMERS", consumers), ("CTAS_PER_SM", ctas_per_sm), ("BLOCK_N", 64)];
        let variant = kernel.variant(&facts, &target, tunables).unwrap();
        assert_eq!(variant.limits.registers, Some(registers), "{}", variant.label());
    }
    // Without a variant there is no such limit.
    assert_eq!(kernel.manifest.limits[&Arch::Sm90a].of_any_variant().registers, None);
}

#[test]
fn a_variant_says_what_to_compile_and_launch() {
    let target = Target::nominal(Arch::Sm89);
    let variant = kernel().variant(&facts(), &target, [("ROWS", 16)]).unwrap();
    assert_eq!(variant.label(), "scale_rows[ROWS=16 THREADS=128]");
    let defines: Vec<(&str, i64)> =
        variant.defines.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(defines, [("HEAD_DIM", 64), ("IS_CAUSAL", 0), ("ROWS", 16), ("THREADS", 128)]);
    assert_eq!(variant.launch.grid, [7, 8, 2]);
    assert_eq!(variant.launch.block, [128, 1, 1]);
    assert_eq!(variant.launch.cluster, [1, 1, 1]);
    assert_eq!(variant.launch.dynamic_smem_bytes, 16 * 64 * 2);
    assert_eq!(variant.limits.registers, Some(40));
    assert_eq!(variant.source_file, "scale_rows.cu");
}

#[test]
fn a_launch_is_programmatic_where_its_expression_says_so() {
    let target = Target::nominal(Arch::Sm90a);
    assert!(!kernel().variant(&facts(), &target, []).unwrap().launch.programmatic);
    let launch = "dynamic_smem = \"ROWS * HEAD_DIM * dtype_bytes\"\n";
    let with = format!("{launch}programmatic = \"ROWS == 16\"\n");
    let mut kernel = kernel();
    kernel.manifest = Manifest::parse(&manifest_text().replace(launch, &with), "k.toml").unwrap();
    for (rows, programmatic) in [(16, true), (32, false)] {
        let variant = kernel.variant(&facts(), &target, [("ROWS", rows)]).unwrap();
        assert_eq!(variant.launch.programmatic, programmatic, "ROWS = {rows}");
    }
    let message = error_with(launch, &with.replace("ROWS ==", "ROWZ =="));
    assert_contains(&message, &["launch.programmatic", "did you mean `ROWS`?"]);
}

#[test]
fn a_launch_has_a_work_counter_where_its_expression_says_so() {
    let target = Target::nominal(Arch::Sm90a);
    assert!(!kernel().variant(&facts(), &target, []).unwrap().launch.counter);
    let launch = "dynamic_smem = \"ROWS * HEAD_DIM * dtype_bytes\"\n";
    let with = format!("{launch}counter = \"ROWS == 16\"\n");
    let mut kernel = kernel();
    kernel.manifest = Manifest::parse(&manifest_text().replace(launch, &with), "k.toml").unwrap();
    for (rows, counter) in [(16, true), (32, false)] {
        let variant = kernel.variant(&facts(), &target, [("ROWS", rows)]).unwrap();
        assert_eq!(variant.launch.counter, counter, "ROWS = {rows}");
        assert!(!variant.launch.programmatic);
    }
    let message = error_with(launch, &with.replace("ROWS ==", "ROWZ =="));
    assert_contains(&message, &["launch.counter", "did you mean `ROWS`?"]);
    let message = error_with(launch, &with.replace("\"ROWS == 16\"", "[\"1\"]"));
    assert_contains(&message, &["k.toml:21:11", "invalid type: sequence"]);
}

#[test]
fn tunables_are_checked() {
    let target = Target::nominal(Arch::Sm89);
    let error = |chosen: (&str, i64)| kernel().variant(&facts(), &target, [chosen]).unwrap_err().to_string();
    assert_contains(&error(("ROW", 16)), &["no tunable `ROW`", "ROWS, THREADS", "did you mean `ROWS`?"]);
    assert_contains(&error(("ROWS", 17)), &["ROWS = 17", "[16, 32, 64]"]);
    let chosen = [("ROWS", 16), ("THREADS", 256)];
    let message = kernel().variant(&facts(), &target, chosen).unwrap_err().to_string();
    assert_contains(&message, &["ROWS=16 THREADS=256", "`THREADS <= ROWS * 8`", "every thread"]);
}

#[test]
fn the_space_is_enumerated_under_its_constraints() {
    let (kernel, facts, target) = (kernel(), facts(), Target::nominal(Arch::Sm89));
    assert_eq!(kernel.space().size(), 9);
    let labels: Vec<String> =
        kernel.variants(&facts, &target).map(|variant| variant.unwrap().label()).collect();
    assert_eq!(labels.len(), 8);
    assert_eq!(labels[0], "scale_rows[ROWS=16 THREADS=64]");
    assert!(!labels.iter().any(|label| label.contains("ROWS=16 THREADS=256")));
    assert_eq!(kernel.count_variants(&facts, &target, 100).unwrap(), SpaceSize::Exactly(8));
    assert_eq!(kernel.count_variants(&facts, &target, 4).unwrap(), SpaceSize::AtLeast(3));
}

/// A folder with the fixture's source and a manifest of its own.
fn folder_with(manifest: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(Path::new(FIXTURE).join("scale_rows.cu"), folder.path().join("scale_rows.cu")).unwrap();
    fs::write(folder.path().join("k.toml"), manifest).unwrap();
    folder
}

#[test]
fn what_a_source_never_reads_is_refused() {
    let error = |from: &str, to: &str| {
        let text = manifest_text();
        assert!(text.contains(from), "{from}");
        let folder = folder_with(&text.replacen(from, to, 1));
        Registry::default().add_folder(folder.path()).unwrap_err().to_string()
    };
    let message = error("[defines]", "[defines]\nNARROW = \"head_dim <= 64\"");
    assert_contains(&message, &["k.toml", "defines.NARROW", "never reads `NARROW`", "[let]"]);
    let kind = "[kind.WHOLE]\nvalues = [0, 1]\ndefault = 0\nwhy = \"full tiles\"\n[defines]";
    assert_contains(&error("[defines]", kind), &["kind.WHOLE", "never reads `WHOLE`"]);
    let tunable = "[tunable.macro.SPARE]\nvalues = [0]\ndefault = 0\n[tunable.macro.ROWS]";
    assert_contains(&error("[tunable.macro.ROWS]", tunable), &["tunable.SPARE", "never reads it"]);
    let unused = "[let]\nNARROW = \"head_dim <= 64\"\n[defines]";
    assert_contains(&error("[defines]", unused), &["let.NARROW", "no expression uses it"]);
}

#[test]
fn names_that_only_expressions_use_reach_no_compiler() {
    // SPARE sets the launch alone, BYTES is a part of an expression; COPIES is a kind that the source reads.
    let text = manifest_text()
        .replacen("\"ROWS * HEAD_DIM * dtype_bytes\"", "\"(1 + SPARE) * BYTES\"", 1)
        .replacen("[defines]", "[let]\nBYTES = \"ROWS * HEAD_DIM * dtype_bytes\"\n[defines]", 1)
        .replacen("IS_CAUSAL = \"causal\"", "", 1)
        + "[tunable.macro.SPARE]\nvalues = [0, 1]\ndefault = 0\n\
           [kind.IS_CAUSAL]\nvalues = [0, 1]\ndefault = 0\nwhy = \"a kind\"\n";
    let folder = folder_with(&text);
    let mut registry = Registry::default();
    registry.add_folder(folder.path()).unwrap();
    let kernel = registry.kernel("scale_rows").unwrap();
    let target = Target::nominal(Arch::Sm89);
    let plain = kernel.variant(&facts(), &target, []).unwrap();
    let names: Vec<&str> = plain.defines.keys().map(String::as_str).collect();
    assert_eq!(names, ["HEAD_DIM", "IS_CAUSAL", "ROWS", "THREADS"]);
    // Twice the shared memory is the same code under another name.
    let spare = kernel.variant(&facts(), &target, [("SPARE", 1)]).unwrap();
    assert_eq!(spare.defines, plain.defines);
    assert_eq!(spare.launch.dynamic_smem_bytes, 2 * plain.launch.dynamic_smem_bytes);
    assert_eq!(spare.label(), "scale_rows[ROWS=32 SPARE=1 THREADS=128]");
    // Another kind is other code under the same name.
    let kind = kernel.variant(&facts(), &target, [("IS_CAUSAL", 1)]).unwrap();
    assert_eq!((kind.label(), kind.defines["IS_CAUSAL"]), (plain.label(), 1));
    let message = kernel.variant(&facts(), &target, [("IS_CAUSAL", 2)]).unwrap_err().to_string();
    assert_contains(&message, &["IS_CAUSAL = 2", "[0, 1]"]);
}

#[test]
fn a_default_is_a_number() {
    let message = error_with("default = 32", "default = \"causal ? 64 : 32\"");
    assert_contains(&message, &["k.toml:28:11", "expected i64"]);
}

#[test]
fn a_refusal_gives_every_reason() {
    let registry = registry();
    let target = Target::nominal(Arch::Sm90a);
    assert_eq!(registry.supporting(&facts(), &target).unwrap().len(), 1);
    let hard = ProblemFacts {
        head_dim: 256,
        value_dim: 128,
        dtype: DType::BF16,
        band_lo: Some(-3),
        lse: true,
        ..facts()
    };
    let error = registry.supporting(&hard, &target).unwrap_err();
    assert!(matches!(&error, Error::NoKernel { closest, .. } if closest.reasons.len() == 5), "{error:?}");
    let message = error.to_string();
    assert_contains(
        &message,
        &["no kernel supports b2h8s100d256/128 bf16 window with LSE on sm_90a", "`scale_rows`"],
    );
    assert_contains(
        &message,
        &["head_dim is 256, it takes 1 to 128", "it reads f16, not bf16", "log-sum-exp"],
    );
    assert!(matches!(Registry::default().supporting(&facts(), &target), Err(Error::Empty)));
}

#[test]
fn launch_sizes_past_cudas_limits_are_refused() {
    let target = Target::nominal(Arch::Sm89);
    let many = ProblemFacts { batch: 70_000, ..facts() };
    let message = kernel().variant(&many, &target, []).unwrap_err().to_string();
    assert_contains(&message, &["launch.grid.z", "70000", "65535"]);
}

#[test]
fn user_folders_are_read_and_wrong_ones_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut registry = registry();
    assert_contains(&registry.add_folder(&path.join("nowhere")).unwrap_err().to_string(), &["nowhere"]);

    fs::write(path.join("other.toml"), manifest_text().replace("\"scale_rows\"", "\"other\"")).unwrap();
    assert_contains(&registry.add_folder(path).unwrap_err().to_string(), &["other.toml", "`scale_rows.cu`"]);

    // A header reads for its source.
    fs::write(path.join("scale_rows.cu"), "#include \"mine.cuh\"\n").unwrap();
    fs::write(path.join("mine.cuh"), "int all() { return HEAD_DIM + IS_CAUSAL + ROWS + THREADS; }\n")
        .unwrap();
    registry.add_folder(path).unwrap();
    let names: Vec<&str> = registry.kernels().map(Kernel::name).collect();
    assert_eq!(names, ["other", "scale_rows"]);
    assert_eq!(registry.kernel("other").unwrap().headers[0].name, "mine.cuh");
    assert_contains(&registry.kernel("othre").unwrap_err().to_string(), &["did you mean `other`?"]);

    assert_contains(&registry.add_folder(path).unwrap_err().to_string(), &["`other` is defined twice"]);
}

#[test]
fn mutants_are_never_selectable() {
    let mutant = manifest_text()
        + "[mutant]\nof = \"scale_rows\"\nbreaks = \"nothing is synchronised\"\ncaught_by = \"sim\"\n\
           shape = \"tiny:causal\"\n";
    let folder = folder_with(&mutant);
    let mut registry = Registry::default();
    registry.add_folder(folder.path()).unwrap();
    assert_eq!(registry.kernels().count(), 0);
    assert_eq!(registry.mutants().count(), 1);
    assert!(registry.kernel("scale_rows").is_err());
    let known_bad = registry.mutants().next().unwrap().manifest.mutant.as_ref().unwrap();
    assert_eq!((known_bad.of.as_str(), known_bad.caught_by), ("scale_rows", Gate::Sim));
    assert_eq!(known_bad.shape.to_string(), "tiny:causal");
    let parse = |from: &str, to: &str| Manifest::parse(&mutant.replacen(from, to, 1), "m.toml");
    assert_contains(&parse("tiny:", "tny:").unwrap_err().to_string(), &["m.toml", "did you mean `tiny`?"]);
    assert_contains(&parse("of = ", "off = ").unwrap_err().to_string(), &["did you mean `of`?"]);
    assert_contains(&parse("\"sim\"", "\"sin\"").unwrap_err().to_string(), &["did you mean `sim`?"]);
}

#[test]
fn lineage_lists_children_under_their_parents() {
    let mut registry = registry();
    let folder = folder_with("");
    fs::remove_file(folder.path().join("k.toml")).unwrap();
    for (name, parent) in [("a_child", "scale_rows"), ("grandchild", "a_child"), ("another", "scale_rows")] {
        let parent = format!("\"{name}\"\nparent = \"{parent}\"\nchanged = \"faster\"\nsummary");
        let text = manifest_text().replacen("\"scale_rows\"\nsummary", &parent, 1);
        fs::write(folder.path().join(format!("{name}.toml")), text).unwrap();
    }
    registry.add_folder(folder.path()).unwrap();
    let lineage: Vec<(&str, usize)> =
        registry.lineage().iter().map(|entry| (entry.name, entry.depth)).collect();
    assert_eq!(lineage, [("scale_rows", 0), ("a_child", 1), ("grandchild", 2), ("another", 1)]);
}

#[test]
fn a_kernel_with_another_source_can_be_put_into_a_folder_and_found_there() {
    let mut registry = Registry::embedded().unwrap();
    let source = registry.kernel("sdpa_v2c").unwrap().source.replace("namespace", "// changed\nnamespace");
    registry.register_source("sdpa_v2c", "sdpa_v2c_p3", &source).unwrap();
    assert!(registry.register_source("sdpa_v2c", "sdpa_v2c_p3", &source).is_err(), "the name is taken");
    let registered = registry.kernel("sdpa_v2c_p3").unwrap().clone();

    let folder = tempfile::tempdir().unwrap();
    for (name, text) in registered.files() {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut elsewhere = Registry::default();
    elsewhere.add_folder(folder.path()).unwrap();
    let found = elsewhere.kernel("sdpa_v2c_p3").unwrap();
    assert_eq!((&found.source, &found.headers), (&registered.source, &registered.headers));
    assert_eq!(found.manifest.parent.as_deref(), Some("sdpa_v2c"));
    let parent = registry.kernel("sdpa_v2c").unwrap();
    assert_eq!(format!("{:?}", found.manifest.tunables), format!("{:?}", parent.manifest.tunables));
    assert_eq!(format!("{:?}", found.manifest.limits), format!("{:?}", parent.manifest.limits));
}

/// A layout that outgrew its manifest would be found by whoever runs it: every source asserts the two to be equal.
#[test]
fn every_shipped_source_asserts_its_shared_memory_against_its_manifest() {
    let registry = Registry::embedded().unwrap();
    let wrong: Vec<&str> = registry
        .kernels()
        .filter(|kernel| kernel.manifest.launch.dynamic_smem.to_string() != "0")
        .filter(|kernel| {
            let texts = kernel.headers.iter().map(|header| header.text.as_str()).chain([&*kernel.source]);
            let asserted = |text: &str| {
                text.split("static_assert(").skip(1).any(|rest| {
                    let condition = rest.split(';').next().unwrap_or_default();
                    condition.contains("== DYNAMIC_SMEM_BYTES") || condition.contains("== LAYOUT_BYTES")
                })
            };
            !texts.into_iter().any(asserted)
        })
        .map(Kernel::name)
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Kinds follow from the problem, so that one which the default does not suit is no reason to refuse it.
#[test]
fn a_kind_with_another_value_supports_what_its_default_does_not() {
    use evosdpa_core::Feature::{Alibi, Bias, BooleanMask, HighPrecision, Softcap};
    let registry = Registry::embedded().unwrap();
    let target = Target::nominal(Arch::Sm90a);
    for name in ["ampere_fwd", "hopper_fwd", "flash_decode"] {
        let kernel = registry.kernel(name).unwrap();
        for feature in [Softcap, Alibi, Bias, BooleanMask, HighPrecision] {
            let features = [feature].into_iter().collect();
            let facts = ProblemFacts { dtype: DType::BF16, kv_dtype: DType::BF16, features, ..facts() };
            kernel.supports(&facts, &target).unwrap();
            let first = kernel.variants(&facts, &target).next().unwrap().unwrap();
            let precise_keys = match (name, feature) {
                (_, HighPrecision) => 256,
                // The device asks which KV tiles need it.
                ("hopper_fwd", Softcap | Alibi) => 256,
                _ => 1 << 30,
            };
            assert_eq!(first.defines["PRECISE_KEYS"], precise_keys, "{name} {feature:?}");
        }
    }
}
