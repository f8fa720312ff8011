//! Every kernel that is shipped compiles for each of its architectures and keeps its limits.

use evosdpa_cuda::{Builder, Error, resources};
use evosdpa_kernels::{Arch, InputType, Kernel, ProblemFacts, Registry, Target};

/// A problem the kernel supports, near the ones people have.
fn problem(kernel: &Kernel, dtype: InputType, target: &Target) -> Option<ProblemFacts> {
    let candidates = [64, 128, 96, 32].into_iter().flat_map(|dim| [(dim, 512), (dim, 2048)]);
    let facts = candidates.map(|(dim, seq)| ProblemFacts {
        batch: 1,
        heads_q: 8,
        heads_kv: 8,
        seq_q: seq,
        seq_kv: seq,
        head_dim: dim,
        value_dim: dim,
        dtype,
        band_lo: None,
        band_hi: None,
        lse: kernel.manifest.lse,
    });
    facts.into_iter().find(|facts| kernel.supports(facts, target).is_ok())
}

fn gate(kernel: &Kernel, arch: Arch, dtype: InputType) -> Result<Vec<String>, Error> {
    let target = Target::nominal(arch);
    let facts = problem(kernel, dtype, &target)
        .unwrap_or_else(|| panic!("{} supports no ordinary problem in {dtype} on {arch}", kernel.name()));
    let variant = kernel.default_variant(&facts, &target)?;
    let report = resources::gate(&Builder::default().build(&variant)?, &variant, &target)?;
    Ok(report.findings.into_iter().filter(|finding| finding.fails).map(|finding| finding.text).collect())
}

#[test]
fn every_kernel_compiles_and_keeps_its_limits() {
    let mut wrong = Vec::new();
    for kernel in Registry::embedded().unwrap().kernels() {
        for arch in &kernel.manifest.archs {
            for dtype in &kernel.manifest.dtypes {
                match gate(kernel, *arch, *dtype) {
                    Ok(failures) if failures.is_empty() => {}
                    Ok(failures) => {
                        wrong.push(format!("{} {arch} {dtype}: {}", kernel.name(), failures.join("; ")))
                    }
                    Err(error) => wrong.push(format!("{} {arch} {dtype}: {error}", kernel.name())),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
