//! `evosdpa precompile`: the kernels that the library would run, compiled into a folder that goes where there is no compiler.

use std::{collections::BTreeMap, time::Duration};

use anyhow::bail;
use evosdpa::{
    DType, Problem,
    choose::{Planner, Question, assumed_tensors, common_problems},
};
use evosdpa_cuda::{
    Artifact, ArtifactKind, Builder, CompileRequest, Precompiled, precompiled::VARIABLE, resources,
    toolkit::Toolkit, worker::CompilePool,
};
use evosdpa_kernels::{Arch, Target, Variant, cache};
use evosdpa_lab::machine::Environment;
use serde::Serialize;

use crate::{Status, args::Precompile, command::registry, interrupt, output, progress};

/// Types of caches that are appended to.
const CACHES: [DType; 3] = [DType::BF16, DType::F16, DType::E4M3];

/// What became of one kernel.
#[derive(Serialize)]
struct Row {
    variant: String,
    arch: String,
    verdict: &'static str,
    why: Option<String>,
    size_bytes: usize,
    build_us: Option<f64>,
}

pub(crate) fn run(args: Precompile) -> anyhow::Result<Status> {
    let planner = Planner::with_tables(registry(&args.kernel_path)?)?;
    let problems = problems(&args)?;
    let mut wanted = BTreeMap::new();
    for arch in &args.arch {
        let target = Target::nominal(*arch);
        for variant in variants(&planner, &problems, &target, !args.shapes.is_empty())? {
            wanted.insert(CompileRequest::new(&variant, ArtifactKind::Cubin).source_key(), (variant, target));
        }
    }
    Toolkit::find()?;
    let folder = Precompiled::create(&args.folder)?;
    interrupt::listen();
    let wanted: Vec<(Variant, Target)> = wanted.into_values().collect();
    let rows = compile(&args, &wanted, &folder)?;
    if args.json {
        output::print_json("precompile", &Environment::look(None), &rows)?;
    } else {
        output::print(&page(&rows, &args.arch, &folder)?)?;
    }
    Ok(match rows.iter().any(|row| row.verdict != "PASS") {
        _ if interrupt::asked() => Status::Interrupted,
        true => Status::Failed,
        false => Status::Passed,
    })
}

fn problems(args: &Precompile) -> anyhow::Result<Vec<Problem>> {
    if args.shapes.is_empty() {
        return Ok(common_problems()?);
    }
    let dtypes = if args.dtype.is_empty() { &[DType::BF16, DType::F16][..] } else { &args.dtype };
    let pairs = args.shapes.iter().flat_map(|shape| dtypes.iter().map(move |dtype| (*shape, *dtype)));
    pairs.map(|(shape, dtype)| Ok(Problem::new(shape, dtype)?)).collect()
}

/// What the library would run, with the kernels that write to caches. What no kernel takes is an error where it was `named`.
fn variants(
    planner: &Planner,
    problems: &[Problem],
    target: &Target,
    named: bool,
) -> anyhow::Result<Vec<Variant>> {
    let mut variants = Vec::new();
    for problem in problems {
        let tensors = assumed_tensors(problem);
        let question = Question { problem, tensors: &tensors, target, device: None };
        match planner.choose_quickly(&question) {
            Ok(choice) => variants.push(choice.variant),
            Err(error) if named => return Err(error.into()),
            Err(_) => {}
        }
    }
    variants.extend(CACHES.map(|dtype| cache::variant(target.arch, dtype)));
    Ok(variants)
}

/// Compiles, holds each kernel against its limits, and puts what passes into the folder.
fn compile(
    args: &Precompile,
    wanted: &[(Variant, Target)],
    folder: &Precompiled,
) -> anyhow::Result<Vec<Row>> {
    let pool = CompilePool::new(args.workers as usize, Duration::from_secs_f64(args.compile_timeout))?;
    // What came along before says nothing of what this compiler makes.
    let builder = Builder::new()?.with_precompiled(None).without_lines().with_pool(pool);
    let variants: Vec<Variant> = wanted.iter().map(|(variant, _)| variant.clone()).collect();
    let bar = progress::bar(variants.len() as u64);
    let built = builder.build_while(&variants, ArtifactKind::Cubin, |i| {
        progress::say(&bar, variants[i].label());
        bar.inc(1);
        !interrupt::asked()
    });
    bar.finish_and_clear();
    let mut rows = Vec::new();
    for ((variant, target), built) in wanted.iter().zip(built) {
        // What Ctrl-C kept from being begun has no row.
        let Some(built) = built else { continue };
        let kept = built.map_err(|error| error.to_string()).and_then(|artifact| {
            let report = resources::gate(&artifact, variant, target).map_err(|error| error.to_string())?;
            match report.findings.iter().find(|finding| finding.fails) {
                Some(finding) => Err(finding.text.clone()),
                None => Ok(artifact),
            }
        });
        if let Ok(artifact) = &kept {
            folder.store(&CompileRequest::new(variant, ArtifactKind::Cubin), artifact)?;
        }
        rows.push(row(variant, kept));
    }
    if rows.is_empty() && !interrupt::asked() {
        bail!("no kernel takes any of these problems on {}", listed(&args.arch));
    }
    Ok(rows)
}

fn row(variant: &Variant, kept: Result<Artifact, String>) -> Row {
    let (variant, arch) = (variant.label(), variant.arch.to_string());
    match kept {
        Ok(artifact) => Row {
            variant,
            arch,
            verdict: "PASS",
            why: None,
            size_bytes: artifact.code.len(),
            build_us: Some(artifact.time.as_secs_f64() * 1e6),
        },
        Err(why) => Row { variant, arch, verdict: "FAIL", why: Some(why), size_bytes: 0, build_us: None },
    }
}

fn page(rows: &[Row], archs: &[Arch], folder: &Precompiled) -> anyhow::Result<String> {
    let line = |arch: &Arch| {
        let of_arch: Vec<&Row> = rows.iter().filter(|row| row.arch == arch.name()).collect();
        let failed = of_arch.iter().filter(|row| row.why.is_some()).count();
        let megabytes = of_arch.iter().map(|row| row.size_bytes).sum::<usize>() as f64 / 1e6;
        let kept = of_arch.len() - failed;
        vec![arch.to_string(), kept.to_string(), failed.to_string(), format!("{megabytes:.1} MB")]
    };
    let mut page = output::table(&["arch", "kernels", "failed", "size"], 1, archs.iter().map(line).collect());
    for row in rows {
        if let Some(why) = &row.why {
            page.push_str(&format!("\nFAIL {}: {why}\n", row.variant));
        }
    }
    let (count, bytes) = folder.size()?;
    let path = folder.folder().display();
    page.push_str(&format!(
        "\n{count} kernels, {:.1} MB, in {path}\nto use them: {VARIABLE}={path}\n",
        bytes as f64 / 1e6
    ));
    Ok(page)
}

fn listed(archs: &[Arch]) -> String {
    archs.iter().map(|arch| arch.name()).collect::<Vec<_>>().join(", ")
}
