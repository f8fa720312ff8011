//! A profile as it is kept.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{
    capture::Launch,
    gate::gate,
    insight::Insight,
    metric::{Metric, Registry},
    roofline::{Roofline, Work},
    simulated::Counted,
    statics::Statics,
    tree::diagnose,
    values::Values,
};
use crate::{
    Error,
    gate::{GateResult, Verdict},
    machine::Environment,
    record::write_whole,
};

/// Schema of `insights.json`.
pub const PROFILE_SCHEMA: &str = "evosdpa.profile/1";

/// What a profile of one kernel on one problem says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileRow {
    /// The kernel, with tunables where they are not the defaults.
    pub kernel: String,
    /// The problem; absent for a capture that does not say.
    pub problem: Option<String>,
    /// Where it ran: `cuda`, `sim`, or `import`.
    pub device: String,
    /// The architecture whose metrics were read.
    pub arch: String,
    /// The profiler's version, where one ran.
    pub ncu: Option<String>,
    /// Blocks and threads as the profiler prints them.
    pub launch: Option<[String; 2]>,
    /// The profile gate.
    pub gates: Vec<GateResult>,
    /// What the two-number rules say: compute-bound, memory-bound, or latency or mixed.
    pub rule: Option<String>,
    /// What holds it back, then what else does.
    pub insights: Vec<Insight>,
    /// Where it stands under the roof.
    pub roofline: Option<Roofline>,
    /// Every metric that was read, in base units.
    pub metrics: BTreeMap<String, f64>,
    /// What the compiler says.
    pub statics: Option<Statics>,
    /// What the simulator counted.
    pub simulated: Option<Counted>,
    /// What the profiler's own rules say.
    pub rules: Vec<String>,
    /// Files beside the record.
    pub files: Vec<String>,
}

impl ProfileRow {
    /// A row of a kernel without a profile.
    pub fn new(kernel: &str, problem: Option<String>, device: &str, arch: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            problem,
            device: device.to_owned(),
            arch: arch.to_owned(),
            ncu: None,
            launch: None,
            gates: Vec::new(),
            rule: None,
            insights: Vec::new(),
            roofline: None,
            metrics: BTreeMap::new(),
            statics: None,
            simulated: None,
            rules: Vec::new(),
            files: Vec::new(),
        }
    }

    /// Takes in a profiled launch: diagnosis, roofline and gate. `has` are the kernel's tunables.
    pub fn profiled(
        &mut self,
        launch: &Launch,
        registry: &Registry,
        work: Option<&Work>,
        has: &[String],
    ) -> Result<(), Error> {
        let values = Values::of(launch, registry)?;
        let advisories = self.statics.as_ref().map(|statics| statics.advisories.clone()).unwrap_or_default();
        self.launch = Some([launch.grid.clone(), launch.block.clone()]);
        self.insights = diagnose(&values, work, has, &advisories);
        self.roofline = work.and_then(|work| Roofline::derive(&values, registry.arch(), work));
        self.gates.push(gate(&values));
        self.rule = Some(two_number_rule(&values).to_owned());
        self.metrics = values.by_name();
        self.rules = launch.rules.iter().map(|(name, text)| format!("{name}: {text}")).collect();
        Ok(())
    }

    /// Marks the profile as not there, and why.
    pub fn unavailable(&mut self, why: &str) {
        self.gates.push(GateResult::unavailable(super::GATE, why));
    }

    /// The verdict of the profile gate.
    pub fn verdict(&self) -> &Verdict {
        self.gates.first().map_or(&Verdict::Pass, |gate| &gate.verdict)
    }

    /// The diagnosis in a line.
    pub fn sentence(&self) -> String {
        let on = self.problem.as_ref().map_or(String::new(), |problem| format!(" on {problem}"));
        match (self.insights.first(), self.verdict()) {
            (Some(insight), Verdict::Pass | Verdict::Fail(_)) => format!(
                "{}{on}: bound by {} (confidence {:.2}). {}",
                self.kernel, insight.bottleneck, insight.confidence, insight.suggestion
            ),
            (_, Verdict::Unavailable(why)) => format!("{}{on}: no profile: {why}", self.kernel),
            (None, _) => format!("{}{on}: nothing stands out", self.kernel),
        }
    }
}

/// The rules as they were first written: tensor cores above 50 % and memory below 70 %, memory above 70 %, both below 40 %.
fn two_number_rule(values: &Values) -> &'static str {
    let (tensor, dram) = (values.required(Metric::TensorPipe), values.required(Metric::DramThroughput));
    match () {
        () if dram > 70.0 => "memory-bound",
        () if tensor > 50.0 => "compute-bound",
        () if tensor < 40.0 && dram < 40.0 => "latency or mixed",
        () => "mixed",
    }
}

/// Writes `insights.json` into a folder.
pub fn save(folder: &Path, environment: &Environment, rows: &[ProfileRow]) -> Result<(), Error> {
    let document = json!({ "schema": PROFILE_SCHEMA, "environment": environment, "rows": rows });
    write_whole(&folder.join("insights.json"), format!("{document:#}\n").as_bytes())
}
