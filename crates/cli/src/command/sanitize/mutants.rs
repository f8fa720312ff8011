//! `evosdpa sanitize --mutants`: do the gates stop what is known to be wrong, and nothing else?

use std::{ffi::OsString, fmt::Write, time::Duration};

use evosdpa_cuda::Program;
use evosdpa_kernels::{Kernel, Mutant};
use evosdpa_lab::{
    device::{Device as _, DeviceId, Sim},
    gate::{
        GateResult, Verdict,
        mutants::{self, MutantRow, variant_name},
        sanitizer::{Checked, Tool},
    },
    machine::Environment,
};

use super::{Ready, device, in_parallel, program, ready};
use crate::{
    Status,
    args::Sanitize,
    command::{refused_device, registry},
    interrupt, output, progress,
};

/// A launch that takes longer hangs: none of the mutants' problems takes a millisecond.
const LAUNCH_SECONDS: &str = "3";

/// The correctness gate, where the GPU gives the answer.
const GPU: &str = "correctness on the GPU";

pub(super) fn run(args: &Sanitize) -> anyhow::Result<Status> {
    let registry = registry(&[])?;
    // Every mutant says what is wrong with it: that is what makes it one.
    let known: Vec<(&Kernel, &Mutant)> =
        registry.mutants().filter_map(|kernel| Some((kernel, kernel.manifest.mutant.as_ref()?))).collect();
    interrupt::listen();
    let bar = progress::bar(known.len() as u64);
    let mut environment = Environment::look(None);
    let sim = Sim::open(registry.clone().with_mutants())?;
    let rows: Vec<MutantRow> = if device(args) == DeviceId::Sim {
        environment.accelerator = sim.accelerator();
        let mut rows = Vec::new();
        for (kernel, about) in known {
            if interrupt::asked() {
                break;
            }
            progress::say(&bar, kernel.name().to_owned());
            rows.push(mutants::on_sim(&sim, kernel, about)?);
            bar.inc(1);
        }
        rows
    } else {
        let DeviceId::Cuda(ordinal) = device(args) else {
            return Err(refused_device(device(args), &["cuda", "cuda:N", "sim"]));
        };
        let ready = ready(args, ordinal).map_err(|why| anyhow::anyhow!("{why}; or use --device sim"))?;
        environment.accelerator = ready.accelerator.clone();
        let program = program()?;
        let trial = Trial { args, sim: &sim, ready: &ready, program: &program };
        let rows = in_parallel(&known, args.workers as usize, |(kernel, about)| {
            let row = trial.of(kernel, about);
            bar.inc(1);
            row
        });
        rows.into_iter().flatten().collect::<anyhow::Result<_>>()?
    };
    bar.finish_and_clear();

    if args.json {
        output::print_json("sanitize.mutants", &environment, &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.gates[0].verdict).collect();
    Ok(Status::of_gates(&verdicts, verdicts.iter().all(|verdict| verdict.is_pass())))
}

/// Mutants on a GPU: each run is a process of its own, because a mutant may hang it or break its context.
struct Trial<'a> {
    args: &'a Sanitize,
    sim: &'a Sim,
    ready: &'a Ready,
    program: &'a Program,
}

impl Trial<'_> {
    fn of(&self, kernel: &Kernel, about: &Mutant) -> anyhow::Result<MutantRow> {
        let mistake = self.gates(kernel, about, true)?;
        let repair = self.gates(kernel, about, false)?;
        Ok(MutantRow::new(kernel, about, mistake, repair))
    }

    fn gates(&self, kernel: &Kernel, about: &Mutant, mistake: bool) -> anyhow::Result<Vec<GateResult>> {
        let built = mutants::built(kernel, about, mistake, self.ready.target)?;
        if built.iter().any(|gate| gate.verdict.is_fail()) {
            return Ok(built);
        }
        // The simulator comes before the GPU, as in every line of gates; what it stops is tried on the GPU all the same, to
        // see who else notices.
        let mut gates = mutants::without_gpu(self.sim, kernel, about, mistake)?;
        let plain = self.checked(&self.arguments(kernel, about, mistake, false)).alone(GPU)?;
        let hangs = plain.detail.contains("did not finish");
        gates.push(plain);
        // A tool has nothing to add to a hang but the time it takes to see it.
        if !hangs {
            let once = self.arguments(kernel, about, mistake, true);
            for tool in Tool::ALL.into_iter().filter(|tool| self.args.tools.contains(tool)) {
                gates.push(self.checked(&once).under(tool)?);
            }
        }
        Ok(gates)
    }

    fn checked<'a>(&'a self, arguments: &'a [OsString]) -> Checked<'a> {
        Checked {
            sanitizer: &self.ready.sanitizer,
            program: &self.program.path,
            arguments,
            limit: Duration::from_secs_f64(self.args.timeout),
        }
    }

    fn arguments(&self, kernel: &Kernel, about: &Mutant, mistake: bool, once: bool) -> Vec<OsString> {
        let shape = about.shape.to_string();
        let name = variant_name(kernel, mistake);
        let device = device(self.args).to_string();
        let fixed = ["check", "--mutants", "--device", &device, "--seeds", "1", "--json"];
        let work = ["--shapes", &shape, "--kernels", &name, "--dtype", "f16"];
        let limits = ["--time-limit", LAUNCH_SECONDS];
        let parts = fixed.into_iter().chain(work).chain(limits).chain(once.then_some("--once"));
        self.program.arguments_before(parts.map(OsString::from).collect())
    }
}

/// A line for each mutant, then what stopped it in words.
fn page(rows: &[MutantRow]) -> String {
    let table_rows = rows
        .iter()
        .map(|row| {
            let caught =
                if row.caught_by.is_empty() { "nothing".to_owned() } else { row.caught_by.join(", ") };
            vec![
                row.mutant.clone(),
                row.gates[0].verdict.word().to_owned(),
                row.expected.to_owned(),
                caught,
                row.problem.clone(),
            ]
        })
        .collect();
    let header = ["mutant", "verdict", "first expected", "caught by", "problem"];
    let mut page = output::table(&header, 9, table_rows);
    for row in rows {
        let word = output::coloured(&row.gates[0].verdict);
        let _ = writeln!(page, "\n{word} {}: {}", row.mutant, row.breaks);
        if !row.gates[0].verdict.is_pass() {
            let _ = writeln!(page, "  {}", row.gates[0].detail);
        }
        if let Some(evidence) = row.evidence() {
            let first: Vec<&str> = evidence.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let _ = writeln!(page, "  {}", first.iter().take(3).copied().collect::<Vec<_>>().join("\n  "));
        }
    }
    page
}
