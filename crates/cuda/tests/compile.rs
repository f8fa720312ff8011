//! Compiling for real: these need NVRTC and fail, saying how to install it, where it is missing.

mod common;
#[path = "common/source.rs"]
mod source;

use std::{fs, time::Instant};

use common::variant;
use evosdpa_cuda::{
    ArtifactKind, Builder, Cache, CompileRequest, Compiler, Error, Origin, Precompiled, cubin::CubinFacts,
    resources,
};
use evosdpa_kernels::{Arch, Target, Variant};
use source::with_source;

const ARCHS: [Arch; 3] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a];

fn build(variant: &Variant) -> evosdpa_cuda::Artifact {
    Builder::default().build(variant).unwrap_or_else(|error| panic!("{error}"))
}

fn gate(variant: &Variant) -> evosdpa_cuda::ResourceReport {
    resources::gate(&build(variant), variant, &Target::nominal(variant.arch)).unwrap()
}

fn failures(variant: &Variant) -> Vec<String> {
    gate(variant).findings.into_iter().filter(|finding| finding.fails).map(|finding| finding.text).collect()
}

#[test]
fn the_fixture_passes_the_gate_on_every_architecture() {
    for arch in ARCHS {
        let variant = variant(arch);
        let report = gate(&variant);
        assert!(report.passed(), "{arch}: {:?}", report.findings);
        assert!((8..=40).contains(&report.entry.resources.registers), "{arch}: {:?}", report.entry);
        assert_eq!(report.entry.arch.as_deref(), Some(arch.name()));
        // One float is static, padded to where the dynamic part starts: 32 rows of 64 halves.
        assert_eq!(report.entry.resources.smem_static_bytes, 16, "{arch}");
        assert_eq!(report.smem_bytes, 16 + 32 * 64 * 2, "{arch}");
        assert_eq!(report.entry.resources.barriers, Some(1), "{arch}");
        assert!(report.occupancy.fraction > 0.5, "{arch}: {:?}", report.occupancy);
    }
}

#[test]
fn the_cubin_agrees_with_the_compilers_report() {
    for arch in ARCHS {
        // Shared memory, stack and a callee, so that every number is more than a default.
        let source = "__device__ __noinline__ float callee(const float* a, int n) {\n\
                        float s = 0; for (int i = 0; i < n; ++i) s += a[i * 7 % 64]; return s; }\n\
                      extern \"C\" __global__ void scale_rows(float* o, int n) {\n\
                        __shared__ float s[100]; float a[64];\n\
                        for (int i = 0; i < 64; ++i) a[i] = o[i] * n;\n\
                        s[threadIdx.x] = o[threadIdx.x]; __syncthreads();\n\
                        o[threadIdx.x] = s[99 - threadIdx.x] + callee(a, n); }\n";
        let artifact = build(&with_source(arch, source));
        let report = artifact.report().unwrap();
        let entry = report.entry("scale_rows").unwrap();
        let facts = CubinFacts::read(&artifact.code).unwrap();
        let kernel = facts.kernel("scale_rows").unwrap();
        assert_eq!(facts.sm, arch.name()[3..5].parse::<u32>().unwrap());
        assert_eq!(kernel.registers, entry.resources.registers, "{arch}");
        assert_eq!((kernel.smem_static_bytes, entry.resources.smem_static_bytes), (400, 400), "{arch}");
        assert_eq!((kernel.stack_bytes, entry.worst_stack_bytes()), (256, 256), "{arch}");
        assert_eq!(kernel.barriers, entry.resources.barriers, "{arch}");
        assert_eq!(kernel.parameter_bytes, Some(12), "{arch}");
        assert_eq!(entry.callees.len(), 1, "{arch}: {}", artifact.log);
    }
}

#[test]
fn what_passes_a_limit_is_named_with_both_numbers() {
    let mut small = variant(Arch::Sm89);
    small.limits.registers = Some(4);
    small.limits.smem_bytes = Some(4000);
    let failures_text = failures(&small).join("\n");
    assert!(failures_text.contains("registers, the kernel's limit on sm_89 is 4"), "{failures_text}");
    assert!(failures_text.contains("4112 bytes of shared memory, the kernel's limit on sm_89 is 4000"));

    let mut large = variant(Arch::Sm89);
    large.limits.smem_bytes = None;
    large.launch.dynamic_smem_bytes = 100 * 1024;
    let failures_text = failures(&large).join("\n");
    assert!(failures_text.contains("102416 bytes of shared memory, one block on sm_89 can have 101376"));

    let spilling = "extern \"C\" __global__ void __launch_bounds__(1024) scale_rows(float* o) { float a[120];\n\
                    for (int i = 0; i < 120; ++i) a[i] = o[i * 1024 + threadIdx.x];\n\
                    __syncthreads();\n\
                    for (int i = 0; i < 120; ++i) for (int j = 0; j < 120; j += 7)\n\
                      o[i * 1024 + threadIdx.x + j] = a[i] * a[j] + a[119 - i]; }\n";
    let failures_text = failures(&with_source(Arch::Sm89, spilling)).join("\n");
    assert!(failures_text.contains("registers, the kernel's limit on sm_89 is 40"), "{failures_text}");
    assert!(failures_text.contains("bytes of stack, the kernel's limit on sm_89 is 0"), "{failures_text}");
}

#[test]
fn a_report_that_disagrees_with_the_cubin_fails() {
    let variant = variant(Arch::Sm90a);
    let mut artifact = build(&variant);
    let registers = artifact.report().unwrap().entries[0].resources.registers;
    artifact.log = artifact.log.replace(&format!("Used {registers} registers"), "Used 31 registers");
    let report = resources::gate(&artifact, &variant, &Target::nominal(Arch::Sm90a)).unwrap();
    assert!(!report.passed());
    let text = &report.findings[0].text;
    assert!(text.contains("31 registers") && text.contains(&format!("the cubin has {registers}")), "{text}");

    let renamed = Variant { entry: "scale_row".to_owned(), ..variant };
    let error = resources::gate(&artifact, &renamed, &Target::nominal(Arch::Sm90a)).unwrap_err().to_string();
    assert!(error.contains("no entry point `scale_row`") && error.contains("scale_rows"), "{error}");
}

#[test]
fn other_parameters_than_a_launch_gives_are_a_finding() {
    for (parameters, takes) in [("const SdpaParams* p", "8"), ("const SdpaParams p, int n", "452")] {
        let source = format!(
            "#include \"params.h\"\nextern \"C\" __global__ void scale_rows({parameters}) {{ __syncthreads(); }}\n"
        );
        let report = gate(&with_source(Arch::Sm89, &source));
        let text: Vec<&str> = report.findings.iter().map(|finding| finding.text.as_str()).collect();
        let expected =
            format!("takes {takes} bytes of parameters and is given 448: `const __grid_constant__");
        assert!(!report.passed() && text.iter().any(|text| text.contains(&expected)), "{text:?}");
    }
}

#[test]
fn local_memory_is_a_finding() {
    let source = "extern \"C\" __global__ void scale_rows(float* o, int n) { float a[64], s = 0;\n\
                  for (int i = 0; i < 64; ++i) a[i] = o[i] * n;\n\
                  for (int i = 0; i < n; ++i) s += a[i * 7 % 64];\n\
                  o[0] = s; }\n";
    let mut variant = with_source(Arch::Sm90a, source);
    variant.limits.stack_bytes = None;
    variant.parameter_bytes = 12;
    let report = gate(&variant);
    assert!(report.passed(), "{:?}", report.findings);
    let found = report.findings.iter().any(|finding| finding.text.contains("Local memory used"));
    assert!(found, "{:?}", report.findings);
}

#[test]
fn a_source_that_does_not_compile_gives_file_and_line() {
    let broken = with_source(
        Arch::Sm90a,
        "#include \"params.h\"\n\nextern \"C\" __global__ void scale_rows() { x = 1; }\n",
    );
    let error = Builder::default().build(&broken).unwrap_err();
    assert!(matches!(error, Error::Compile(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("scale_rows[ROWS=32 THREADS=128] does not compile for sm_90a"), "{text}");
    assert!(text.contains("scale_rows.cu(3): error: identifier \"x\" is undefined"), "{text}");

    let inside_header = common::fixture().headers[0].text.replace("int batch;", "int batch");
    let mut broken = variant(Arch::Sm90a);
    let mut headers = broken.headers.to_vec();
    headers[0].text = inside_header;
    broken.headers = headers.into();
    let text = Builder::default().build(&broken).unwrap_err().to_string();
    assert!(text.contains("params.h("), "{text}");
}

#[test]
fn ptx_names_the_source_file_and_its_lines() {
    for arch in ARCHS {
        let artifact = Builder::default().ptx(&variant(arch)).unwrap();
        assert_eq!(artifact.kind, ArtifactKind::Ptx);
        let ptx = artifact.ptx();
        assert!(ptx.contains(&format!(".target {}", arch.name())), "{arch}");
        assert!(ptx.contains(".visible .entry scale_rows"), "{arch}");
        let file = ptx.lines().find(|line| line.contains(".file") && line.contains("scale_rows.cu\""));
        assert!(file.is_some() && ptx.contains(".loc"), "{arch}: {ptx}");
    }
}

#[test]
fn compiling_twice_gives_the_same_bytes() {
    let variant = variant(Arch::Sm89);
    assert_eq!(build(&variant).code, build(&variant).code);
}

/// The machine code of a cubin's kernels.
fn instructions(cubin: &[u8]) -> Vec<Vec<u8>> {
    use object::{Object, ObjectSection};
    let file = object::File::parse(cubin).unwrap();
    let of_kernels =
        file.sections().filter(|section| section.name().is_ok_and(|name| name.starts_with(".text.")));
    of_kernels.map(|section| section.data().unwrap().to_vec()).collect()
}

/// What was compiled elsewhere is taken as it is, but for what it was not made from, and damaged files count as absent.
#[test]
fn what_came_along_is_taken_for_the_same_source_alone() {
    let folder = tempfile::tempdir().unwrap();
    let came = Precompiled::create(&folder.path().join("kernels")).unwrap();
    let (here, other) = (variant(Arch::Sm89), variant(Arch::Sm90a));
    let made = build(&here);

    // What goes elsewhere has no source lines, and the same instructions.
    let lean = Builder::default().without_lines().build(&here).unwrap();
    assert!(2 * lean.code.len() < made.code.len(), "{} of {}", lean.code.len(), made.code.len());
    assert_eq!(instructions(&lean.code), instructions(&made.code));
    came.store(&CompileRequest::new(&here, ArtifactKind::Cubin), &lean).unwrap();

    let builder = Builder::default().with_precompiled(Some(came.clone()));
    let taken = builder.build(&here).unwrap();
    assert_eq!((taken.origin, &taken.code, &taken.log), (Origin::Precompiled, &lean.code, &lean.log));
    assert_eq!(came.size().unwrap().0, 1);
    assert!(resources::gate(&taken, &here, &Target::nominal(Arch::Sm89)).unwrap().passed());
    // Another architecture, another source, and PTX are made here.
    let changed = with_source(Arch::Sm89, &format!("{} ", here.source));
    for variant in [&other, &changed] {
        assert_eq!(builder.build(variant).unwrap().origin, Origin::Compiled);
    }
    assert_eq!(builder.ptx(&here).unwrap().origin, Origin::Compiled);

    let path = folder.path().join("kernels").join(format!("{}.kernel", taken.key));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(builder.build(&here).unwrap().origin, Origin::Compiled);
    // It is not ours to remove.
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn the_cache_is_used_repaired_and_keyed_by_everything() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path(), 1 << 30).unwrap();
    let builder = Builder::default().with_cache(Some(cache.clone()));
    let variant = variant(Arch::Sm89);
    let cold = builder.build(&variant).unwrap();
    assert_eq!(cold.origin, Origin::Compiled);

    let took = (0..10).map(|_| {
        let start = Instant::now();
        let warm = builder.build(&variant).unwrap();
        assert_eq!(warm.origin, Origin::Cache);
        assert_eq!((&warm.code, &warm.log), (&cold.code, &cold.log));
        start.elapsed()
    });
    // The quickest: the others may have waited for a processor.
    let quickest = took.min().unwrap();
    assert!(quickest.as_millis() < 50, "{quickest:?}");

    // One flipped bit in the middle of the code.
    let path = folder.path().join(format!("{}.kernel", cold.key));
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() - cold.code.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&path, bytes).unwrap();
    let repaired = builder.build(&variant).unwrap();
    assert_eq!(repaired.origin, Origin::Compiled);
    assert_eq!(repaired.code, cold.code);
    assert_eq!(builder.build(&variant).unwrap().origin, Origin::Cache);

    let request = CompileRequest::new(&variant, ArtifactKind::Cubin);
    let key = |change: &dyn Fn(&mut CompileRequest)| {
        let mut request = request.clone();
        change(&mut request);
        request.key("compiler")
    };
    let keys = [
        key(&|_| {}),
        request.key("another compiler"),
        key(&|request| request.source.push(' ')),
        key(&|request| request.headers[0].1.push(' ')),
        key(&|request| request.headers[0].0.push('x')),
        key(&|request| request.options.push("--use_fast_math".to_owned())),
        key(&|request| request.kind = ArtifactKind::Ptx),
        key(&|request| request.file_name.push('x')),
    ];
    for (i, a) in keys.iter().enumerate() {
        assert!(keys[..i].iter().all(|b| a != b), "key {i} repeats");
    }
    // What only names it does not decide it.
    assert_eq!(keys[0], key(&|request| request.label.push('x')));
}

#[test]
fn the_c_struct_is_laid_out_as_in_rust() {
    // params.h asserts its own offsets; compiling it is the test. The size is what a launch copies.
    let artifact = build(&variant(Arch::Sm90a));
    let facts = CubinFacts::read(&artifact.code).unwrap();
    let bytes = facts.kernel("scale_rows").unwrap().parameter_bytes;
    assert_eq!(bytes, Some(size_of::<evosdpa_kernels::SdpaParams>() as u32));
}

#[test]
fn the_compiler_knows_its_version_and_place() {
    let compiler = Compiler::open().unwrap_or_else(|error| panic!("{error}"));
    let version = compiler.version();
    assert!(version.starts_with("12.") || version.starts_with("13."), "{version}");
    assert!(compiler.toolkit().include[0].join("cuda_fp16.h").is_file());
}

#[test]
fn cubins_that_are_none_are_refused() {
    let cubin = build(&variant(Arch::Sm80)).code;
    assert!(CubinFacts::read(&cubin).is_ok());
    assert!(CubinFacts::read(&[]).is_err());
    assert!(CubinFacts::read(b"\x7fELF").is_err());
    for cut in (0..cubin.len()).step_by(97) {
        assert!(CubinFacts::read(&cubin[..cut]).is_err(), "{cut}");
    }
    // Whatever a damaged file says, reading it must not panic.
    for i in (0..cubin.len()).step_by(13) {
        let mut damaged = cubin.clone();
        damaged[i] ^= 0xff;
        let _ = CubinFacts::read(&damaged);
    }
}
