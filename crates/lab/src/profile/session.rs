//! One place to profile kernels from: under `ncu` where its counters can be had, else by what compiler and simulator say.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use evosdpa_core::Problem;
use evosdpa_cuda::Program;
use evosdpa_kernels::{ProblemFacts, Registry, Target, VariantId};

use super::{
    capture::{Capture, Launch},
    metric,
    ncu::{Collected, Ncu, Request, Unprofiled},
    record::ProfileRow,
    roofline::Work,
    simulated::Counted,
    statics::{self, Statics},
};
use crate::{
    Error,
    device::{DeviceId, Sim},
    error::IoContext,
    record::write_whole,
    variants,
};

/// Where there is no GPU, counts are made on this many rows and keys: enough for every line of a kernel to be reached.
const COUNTED_SEQUENCE: usize = 64;

/// What there is to profile with.
pub struct Session {
    registry: Registry,
    target: Target,
    /// The device's name on the command line.
    device: DeviceId,
    ncu: Result<Ncu, Unprofiled>,
    sim: Result<Sim, String>,
    /// What launches a kernel under the profiler: this program, as `profile --launch`.
    program: Program,
    kernel_path: Vec<PathBuf>,
    limit: Duration,
}

impl Session {
    /// Profiles on a device with a profiler, or without one for a reason. `limit` is for one kernel under the profiler.
    pub fn open(
        registry: Registry,
        target: Target,
        device: DeviceId,
        ncu: Result<Ncu, Unprofiled>,
        limit: Duration,
    ) -> Result<Self, Error> {
        let sim = Sim::open(registry.clone()).map_err(|error| error.to_string());
        let program = Program::running()?;
        Ok(Self { registry, target, device, ncu, sim, program, kernel_path: Vec::new(), limit })
    }

    /// With the folders of kernels that the registry was made from, for the program under the profiler.
    pub fn with_kernel_path(mut self, folders: &[PathBuf]) -> Self {
        self.kernel_path = folders.to_vec();
        self
    }

    /// Whether it knows a kernel.
    pub fn knows(&self, kernel: &str) -> bool {
        self.registry.kernel(kernel).is_ok()
    }

    /// Takes in the kernels of another folder.
    pub fn add_folder(&mut self, folder: &Path) -> Result<(), Error> {
        self.registry.add_folder(folder)?;
        self.kernel_path.push(folder.to_owned());
        self.sim = Sim::open(self.registry.clone()).map_err(|error| error.to_string());
        Ok(())
    }

    /// Why there are no counters, if there are none.
    pub fn without_counters(&self) -> Option<&str> {
        self.ncu.as_ref().err().map(|Unprofiled(why)| why.as_str())
    }

    /// Does without counters from now on.
    pub fn give_up_counters(&mut self, why: &str) {
        self.ncu = Err(Unprofiled(why.to_owned()));
    }

    /// Profiles one launch of a kernel (`sdpa_v2c`, with or without tunables); the profiler's files go into a folder. Where
    /// it cannot be profiled, the gate is unavailable with the reason and the static view stands in; an error is about
    /// files and processes of this machine, or about a capture that cannot be read.
    pub fn profile(&self, name: &str, problem: &Problem, folder: &Path) -> Result<ProfileRow, Error> {
        let VariantId { kernel: plain, tunables } = name.parse()?;
        let kernel = self.registry.kernel(&plain)?;
        let arch = self.target.arch;
        let simulated = self.device == DeviceId::Sim;
        let device = self.device.to_string();
        let mut row = ProfileRow::new(name, Some(problem.to_string()), &device, arch.name());
        let facts = ProblemFacts::try_from(problem)?;
        if let Err(refusal) = kernel.supports(&facts, &self.target)
            && !simulated
        {
            row.unavailable(&refusal.to_string());
            return Ok(row);
        }
        let request = variants::Request {
            targets: Vec::new(),
            dtypes: vec![facts.dtype],
            shape: problem.shape(),
            adapt: false,
            set: tunables.to_map().into_iter().collect(),
            all_variants: None,
        };
        match statics::look(&self.registry, &request, &plain, &self.target)? {
            Ok(statics) => row.statics = Some(statics),
            Err(why) => row.rules.push(format!("no static view: {why}")),
        }
        let has: Vec<String> = kernel.manifest.tunables.iter().map(|tunable| tunable.name.clone()).collect();
        let metrics = metric::Registry::of(arch);
        let collected = match &self.ncu {
            Ok(ncu) => {
                row.ncu = Some(ncu.version.clone());
                let arguments =
                    self.program.arguments_before(self.launch_arguments(name, problem, facts.dtype.name()));
                ncu.collect(&Request {
                    program: &self.program.path,
                    arguments: &arguments,
                    entry: &kernel.manifest.entry,
                    registry: &metrics,
                    limit: self.limit,
                })?
            }
            Err(why) => Err(why.clone()),
        };
        match collected {
            Ok(collected) => {
                // Kept first: a capture that cannot be read is the one to look at.
                row.files = keep(folder, &stem(name, problem), &collected)?;
                row.profiled(&joined(&collected)?, &metrics, Some(&Work::from(problem)), &has)?;
            }
            Err(Unprofiled(why)) => {
                row.unavailable(&why);
                self.look_without_counters(&mut row, name, problem, &has);
            }
        }
        Ok(row)
    }

    /// What compiler and simulator say. The simulator counts the problem itself where that was asked for, else a corner of
    /// it.
    fn look_without_counters(&self, row: &mut ProfileRow, name: &str, problem: &Problem, has: &[String]) {
        let counted_on = if self.device == DeviceId::Sim { Some(*problem) } else { corner(problem) };
        let counted = self.sim.as_ref().map_err(Clone::clone).and_then(|sim| match &counted_on {
            Some(problem) => Counted::of(sim, name, problem).map_err(|error| error.to_string()),
            None => Err("there is no smaller problem of its kind".to_owned()),
        });
        let mut insights =
            row.statics.as_ref().map(|statics: &Statics| statics.insights(has)).unwrap_or_default();
        match counted {
            Ok(counted) => {
                insights.extend(counted.insights(has));
                row.simulated = Some(counted);
            }
            Err(why) => row.rules.push(format!("no simulated counts: {why}")),
        }
        insights.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        row.insights = insights;
    }

    fn launch_arguments(&self, name: &str, problem: &Problem, dtype: &str) -> Vec<OsString> {
        let shape = problem.shape().to_string();
        let device = self.device.to_string();
        let fixed = ["profile", "--launch", "--device", &device, "--dtype", dtype];
        let what = ["--shape", &shape, "--kernels", name];
        let mut arguments: Vec<OsString> = fixed.into_iter().chain(what).map(OsString::from).collect();
        for folder in &self.kernel_path {
            arguments.extend(["--kernel-path".into(), folder.into()]);
        }
        arguments
    }
}

/// Longer stems are cut: a file name has at most 255 bytes, and people read them.
const STEM_MAX: usize = 100;

/// The part of file names that says what was profiled. A name with many tunables becomes the kernel's with a few digits of the
/// hash of the whole.
pub fn stem(name: &str, problem: &Problem) -> String {
    let of = |name: &str| {
        let text = format!("{name}_{}_{}", problem.shape(), problem.dtype());
        let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '.' };
        text.chars().map(allowed).collect::<String>()
    };
    let whole = of(name);
    if whole.len() <= STEM_MAX {
        return whole;
    }
    let hash = blake3::hash(whole.as_bytes()).to_hex();
    let kernel: String = VariantId::kernel_of(name).chars().take(STEM_MAX).collect();
    let mut short: String = of(&kernel).chars().take(STEM_MAX).collect();
    short.push('_');
    short.push_str(&hash[..12]);
    short
}

fn keep(folder: &Path, stem: &str, collected: &Collected) -> Result<Vec<String>, Error> {
    let files = [
        ("csv", collected.wide.as_bytes()),
        ("details.csv", collected.long.as_bytes()),
        ("log", collected.log.as_bytes()),
        ("ncu-rep", collected.report.as_slice()),
    ];
    let hint = "choose another folder with --out, or free some space";
    std::fs::create_dir_all(folder).doing("create", folder, hint)?;
    let mut names = Vec::new();
    for (ending, contents) in files {
        let name = format!("profile_{stem}.{ending}");
        let path = folder.join(&name);
        write_whole(&path, contents)?;
        names.push(name);
    }
    Ok(names)
}

/// One head and a few rows of a problem, same head dimension and mask.
fn corner(problem: &Problem) -> Option<Problem> {
    let sizes = problem.sizes();
    let shape = problem.shape().to_string();
    let mask = shape.split_once(':').map_or(String::new(), |(_, mask)| format!(":{mask}"));
    let (q, kv) = (sizes.seq_q.min(COUNTED_SEQUENCE), sizes.seq_kv.min(COUNTED_SEQUENCE));
    let text = format!("b1h1s{q}/{kv}d{}/{}{mask}", sizes.dim_qk, sizes.dim_v);
    Problem::new(text.parse().ok()?, problem.dtype()).ok()
}

/// The one launch of a profile: numbers of the wide form, rules of the long one.
fn joined(collected: &Collected) -> Result<Launch, Error> {
    let mut launch = first_launch(Capture::parse(&collected.wide, "ncu's raw page")?);
    let details = first_launch(Capture::parse(&collected.long, "ncu's details page")?);
    launch.rules = details.rules;
    Ok(launch)
}

fn first_launch(capture: Capture) -> Launch {
    // A capture without launches is refused when it is read.
    capture.launches.into_iter().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With all 22 tunables of a kernel in it a name was longer than a file's may be, and every capture was lost.
    #[test]
    fn names_of_captures_fit_a_file_system_and_stay_apart() {
        let problem = Problem::new("mission:causal".parse().unwrap(), evosdpa_core::DType::BF16).unwrap();
        assert_eq!(stem("sdpa_v2c[A=1]", &problem), "sdpa_v2c.A.1._mission.causal_bf16");
        let variant = |last: i64| {
            let tunables: Vec<String> =
                (0..22).map(|i| format!("SOME_LONG_TUNABLE_{i}={}", last * i)).collect();
            stem(&format!("hopper_fwd[{}]", tunables.join(" ")), &problem)
        };
        assert!(
            variant(1).len() < 120 && variant(1).starts_with("hopper_fwd_mission.causal_bf16_"),
            "{}",
            variant(1)
        );
        assert!(variant(1) == variant(1) && variant(1) != variant(2));
    }
}
