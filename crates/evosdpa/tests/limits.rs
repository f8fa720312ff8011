//! Every kernel that is shipped compiles for each of its architectures and keeps its limits.

use std::{sync::Mutex, thread};

use evosdpa::choose;
use evosdpa_core::{DType, Feature};
use evosdpa_cuda::{Builder, Error, Finding, resources};
use evosdpa_kernels::{Arch, Assignment, Kernel, ProblemFacts, Registry, Target};

/// A problem the kernel supports, near the ones people have.
fn problem(kernel: &Kernel, dtype: DType, target: &Target) -> Option<ProblemFacts> {
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
        kv_dtype: dtype,
        band_lo: None,
        band_hi: None,
        lse: kernel.manifest.lse,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    });
    facts.into_iter().find(|facts| kernel.supports(facts, target).is_ok())
}

fn gate(kernel: &Kernel, arch: Arch, dtype: DType) -> Result<Vec<String>, Error> {
    let target = Target::nominal(arch);
    let facts = problem(kernel, dtype, &target)
        .unwrap_or_else(|| panic!("{} supports no ordinary problem in {dtype} on {arch}", kernel.name()));
    let variant = choose::variant(kernel, &facts, &target, &Assignment::default()).unwrap();
    let report = resources::gate(&Builder::new()?.build(&variant)?, &variant, &target)?;
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

/// The defaults of the fast kernels change their whole structure with the problem: one of each kind. MMAs that the compiler
/// serialises, or registers that are not reallocated, only cost time elsewhere; here they count as failures.
#[test]
fn defaults_of_every_kind_keep_their_limits() {
    let problem = |[batch, heads_q, heads_kv, seq_q, seq_kv, dim]: [u32; 6], causal: bool| ProblemFacts {
        batch,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv,
        head_dim: dim,
        value_dim: dim,
        dtype: DType::BF16,
        kv_dtype: DType::BF16,
        band_lo: None,
        band_hi: causal.then_some(0),
        lse: true,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    };
    let cases = [
        ("ampere_fwd", problem([2, 8, 8, 2048, 2048, 64], false)), // rows enough to fill the machine
        ("ampere_fwd", problem([2, 8, 8, 2048, 2048, 64], true)),
        ("ampere_fwd", problem([2, 8, 8, 2048, 2048, 128], true)),
        ("hopper_fwd", problem([2, 8, 8, 2048, 2048, 64], false)), // two consumers, queries in registers
        ("hopper_fwd", problem([2, 8, 8, 2048, 2048, 64], true)),  // and paired Q tiles
        ("hopper_fwd", problem([32, 32, 32, 512, 512, 64], false)), // four consumers
        ("hopper_fwd", problem([8, 32, 32, 2048, 2048, 64], false)), // three
        ("hopper_fwd", problem([4, 32, 32, 4000, 4000, 64], false)), // three, the last tile not whole
        ("hopper_fwd", problem([8, 32, 8, 2048, 2048, 64], true)), // three, longest Q tiles first, by a counter
        ("hopper_fwd", problem([32, 32, 32, 512, 512, 64], true)), // three CTAs of one
        ("hopper_fwd", problem([4, 16, 16, 4096, 4096, 128], false)),
        ("hopper_fwd", problem([2, 16, 16, 8192, 8192, 128], true)),
        ("hopper_fwd", problem([2, 8, 8, 2000, 2000, 192], true)),
        ("hopper_fwd", problem([4, 8, 8, 4096, 4096, 256], false)), // O straight to global memory
        ("hopper_fwd", problem([4, 8, 8, 4096, 4096, 256], true)),
        ("hopper_fwd", problem([32, 8, 8, 512, 512, 256], true)),
        ("hopper_fwd", problem([32, 8, 8, 500, 500, 256], false)),
        ("hopper_fwd", problem([1, 8, 8, 2048, 2048, 64], true)), // few Q tiles, longest first
        ("hopper_fwd", problem([3, 8, 8, 2048, 2048, 128], true)),
        ("hopper_fwd", problem([2, 8, 8, 2048, 2048, 128], true)), // pairs that fill the machine once
        ("hopper_fwd", problem([2, 8, 8, 2048, 2048, 256], true)),
        ("hopper_fwd", problem([8, 32, 8, 192, 4096, 128], false)), // two heads share a Q tile
        ("hopper_fwd", problem([16, 32, 4, 16, 8192, 128], true)),  // eight heads
        ("hopper_small", problem([1, 8, 8, 512, 512, 64], false)),
        ("hopper_small", problem([1, 8, 8, 512, 512, 64], true)), // masked
        ("hopper_small", problem([2, 8, 8, 512, 512, 64], false)), // no cluster
        ("hopper_small", problem([2, 8, 8, 500, 500, 64], true)),
        ("hopper_small", problem([1, 32, 8, 1, 8192, 128], false)), // decoding
        ("hopper_small", problem([16, 32, 4, 1, 8192, 128], false)), // with eight heads in a Q tile
        // Code for any number of keys, with the second PV of rows that see few of them.
        ("hopper_fwd", problem([2, 8, 8, 1000, 1000, 64], false)),
        ("hopper_fwd", problem([40, 8, 8, 200, 200, 64], false)),
        ("hopper_fwd", problem([4, 32, 8, 1000, 1000, 128], false)),
        ("hopper_fwd", problem([4, 32, 8, 1000, 1000, 192], false)),
        ("hopper_fwd", problem([16, 8, 8, 300, 300, 256], false)),
        ("hopper_fwd", problem([8, 8, 8, 1000, 1000, 256], false)),
        ("hopper_small", problem([1, 8, 8, 300, 300, 64], false)),
        ("hopper_small", problem([2, 8, 8, 1000, 1000, 128], false)),
        ("hopper_small", problem([1, 32, 8, 1, 1000, 128], false)),
        ("hopper_small", problem([1, 32, 8, 1, 5000, 128], false)),
        ("hopper_small", problem([8, 32, 8, 1, 5000, 128], false)),
        ("hopper_small", problem([64, 32, 8, 1, 5000, 256], false)),
        ("hopper_small", problem([8, 64, 8, 1, 5000, 128], false)),
        ("hopper_small", problem([4, 64, 8, 1, 1000, 64], false)), // eight heads, one warpgroup
        ("hopper_wide", problem([4, 8, 8, 2048, 2048, 512], false)),
        ("hopper_wide", problem([4, 8, 8, 2048, 2048, 512], true)),
        ("hopper_wide", problem([4, 8, 8, 1000, 1000, 448], false)),
        ("hopper_wide", problem([4, 8, 8, 2048, 2048, 320], true)),
    ];
    use Feature::*;
    let asking = |facts: ProblemFacts, features: &[Feature]| ProblemFacts {
        page_size: if features.contains(&PagedCache) { 16 } else { 0 },
        block_q: if features.contains(&BlockMask) { 128 } else { 0 },
        block_kv: if features.contains(&BlockMask) { 128 } else { 0 },
        features: features.iter().copied().collect(),
        ..facts
    };
    let coded = |sizes| ProblemFacts { kv_dtype: DType::E4M3, ..problem(sizes, false) };
    let single = |sizes| ProblemFacts { dtype: DType::F32, kv_dtype: DType::F32, ..problem(sizes, true) };
    let everything = [
        PackedQueries,
        UsedQueries,
        UsedLengths,
        PagedCache,
        Softcap,
        Alibi,
        Bias,
        BooleanMask,
        Chunks,
        Sinks,
    ];
    // Lengths, pages and modifiers, alone and together.
    let asking = [
        ("ampere_fwd", asking(problem([4, 32, 8, 2048, 2048, 128], true), &everything)),
        ("ampere_fwd", asking(problem([4, 32, 8, 2048, 2048, 512], true), &everything)),
        ("ampere_f32", asking(single([4, 32, 8, 2048, 2048, 256]), &everything)),
        ("ampere_fwd", asking(problem([4, 32, 8, 2048, 2048, 128], true), &[BlockMask, Softcap])),
        ("ampere_f32", asking(single([4, 32, 8, 2048, 2048, 128]), &[BlockMask])),
        ("hopper_fwd", asking(problem([4, 32, 8, 2048, 2048, 128], false), &[BlockMask])),
        ("hopper_fwd", asking(problem([4, 32, 8, 2048, 2048, 256], true), &[BlockMask, BooleanMask])),
        ("hopper_fwd", asking(problem([4, 32, 8, 2048, 2048, 128], true), &[PackedQueries, PackedKeys])),
        ("hopper_fwd", asking(problem([4, 32, 8, 2048, 2048, 256], true), &everything)),
        ("hopper_fwd", asking(problem([16, 32, 8, 1, 8192, 128], false), &[UsedLengths, PagedCache])),
        ("flash_decode", asking(problem([16, 32, 8, 16, 8192, 128], true), &everything)),
        ("flash_decode", asking(problem([16, 32, 8, 1, 8192, 256], false), &everything)),
        ("flash_decode", asking(coded([16, 32, 8, 1, 8192, 128]), &[KvType, UsedLengths, PagedCache])),
        (
            "flash_decode",
            asking(coded([16, 32, 8, 16, 8192, 256]), &[KvType, TokenScales, UsedLengths, PagedCache]),
        ),
    ];
    let registry = Registry::embedded().unwrap();
    let wrong = |(name, facts): (&str, ProblemFacts)| -> Vec<String> {
        let kernel = registry.kernel(name).unwrap();
        let targets = kernel.manifest.archs.iter().map(|arch| Target::nominal(*arch));
        let of_target = |target: Target| {
            let variant = choose::variant(kernel, &facts, &target, &Assignment::default()).unwrap();
            let report =
                resources::gate(&Builder::new().unwrap().build(&variant).unwrap(), &variant, &target)
                    .unwrap();
            let fails =
                |f: &Finding| f.fails || f.text.contains("serialized") || f.text.contains("setmaxnreg");
            let findings = report.findings.into_iter().filter(fails);
            findings.map(|f| format!("{} {}: {}", variant.label(), variant.arch, f.text)).collect::<Vec<_>>()
        };
        targets.flat_map(of_target).collect()
    };
    // Two at a time: the compiler takes most of the test.
    let left = Mutex::new(cases.into_iter().chain(asking));
    let next = || left.lock().unwrap().next();
    let work = || std::iter::from_fn(next).flat_map(wrong).collect::<Vec<String>>();
    let wrong = thread::scope(|scope| {
        let other = scope.spawn(work);
        [work(), other.join().unwrap()].concat()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
