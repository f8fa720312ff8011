//! One kernel or baseline on one problem.

use std::collections::BTreeMap;

use evosdpa_kernels::VariantId;
use serde::{Deserialize, Serialize};

use crate::{
    baseline::torch,
    device::{AUTO, DeviceId},
    gate::GateResult,
    measure::{compare::Comparison, interleave::Times, roof::Roof, samples::Summary, work::Work},
};

/// What was seen of one kernel or baseline on one problem. Times are there only if every gate that ran passed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The kernel's or baseline's name; `auto` where the library chose.
    pub kernel: String,
    /// The variant that ran, where that is more than the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Whether it is a baseline rather than one of ours; documents have always called it a peer.
    #[serde(rename = "peer")]
    pub baseline: bool,
    /// The device it ran on.
    pub device: DeviceId,
    /// The problem, as text: shape, dtype, and what else is not the default.
    pub problem: String,
    /// The gates in the order they ran.
    pub gates: Vec<GateResult>,
    /// Every sample in the order it was taken.
    #[serde(default)]
    pub samples_us: Vec<f64>,
    /// Samples per round: samples of one round were taken together, between those of the others.
    #[serde(default)]
    pub samples_per_round: Vec<usize>,
    /// When each sample's call began, in nanoseconds since measuring began; empty in records that do not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples_began_ns: Vec<u64>,
    /// Median time.
    pub p50_us: Option<f64>,
    /// 90th percentile.
    pub p90_us: Option<f64>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// 95 % bootstrap interval of the median.
    pub p50_interval_us: Option<[f64; 2]>,
    /// Median time behind a small foreign kernel, whose own time is subtracted; for short problems on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_p50_us: Option<f64>,
    /// 95 % bootstrap interval of that median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_p50_interval_us: Option<[f64; 2]>,
    /// Samples beyond Tukey's fences; kept in every number.
    pub outliers: usize,
    /// Useful operations over the median time.
    pub gflops: Option<f64>,
    /// The fewest bytes that must move, over the median time.
    pub gbps: Option<f64>,
    /// `gflops` over the machine's measured peak, in percent.
    pub percent_of_peak: Option<f64>,
    /// The share of the roof over the problem's operations and bytes that the median reaches, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<f64>,
    /// How many times as fast as each baseline (and as the first kernel).
    pub speedup: BTreeMap<String, Comparison>,
    /// How it was timed: graph, warm, single, cold or between.
    #[serde(default)]
    pub timing: String,
    /// Median of the device's clock during its duels, in cycles per nanosecond, where it can be read.
    #[serde(default)]
    pub clock_ghz: Option<f64>,
    /// What the clock itself adds to every sample, where that is not nothing. It is not subtracted.
    #[serde(default)]
    pub clock_overhead_us: Option<f64>,
    /// The least that bytes and operations allow.
    #[serde(default)]
    pub floor_us: Option<f64>,
}

impl Row {
    /// A row that has not been measured.
    pub fn new(kernel: &str, baseline: bool, device: DeviceId, problem: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            variant: None,
            baseline,
            device,
            problem: problem.to_owned(),
            gates: Vec::new(),
            samples_us: Vec::new(),
            samples_per_round: Vec::new(),
            samples_began_ns: Vec::new(),
            p50_us: None,
            p90_us: None,
            p99_us: None,
            p50_interval_us: None,
            between_p50_us: None,
            between_p50_interval_us: None,
            outliers: 0,
            gflops: None,
            gbps: None,
            percent_of_peak: None,
            roofline: None,
            speedup: BTreeMap::new(),
            timing: String::new(),
            clock_ghz: None,
            clock_overhead_us: None,
            floor_us: None,
        }
    }

    /// How tables call it: its name, and what the library chose where it did: `auto → hopper_fwd[…]`.
    pub fn shown(&self) -> String {
        match &self.variant {
            Some(variant) if self.kernel == AUTO => {
                let kernel = VariantId::kernel_of(variant);
                let tunables = if kernel == variant { "" } else { "[…]" };
                format!("{AUTO} → {kernel}{tunables}")
            }
            _ => self.kernel.clone(),
        }
    }

    /// Whether a gate failed.
    pub fn failed(&self) -> bool {
        self.gates.iter().any(|gate| gate.verdict.is_fail())
    }

    /// The first gate that did not pass.
    pub fn first_problem(&self) -> Option<&GateResult> {
        self.gates.iter().find(|gate| !gate.verdict.is_pass())
    }

    /// The comparison with the fastest baseline: the one that would be picked instead.
    pub fn fastest_baseline(&self) -> Option<(&String, &Comparison)> {
        let baselines = self.speedup.iter().filter(|(name, _)| torch::is_baseline(name));
        baselines.min_by(|(_, a), (_, b)| a.ratio.total_cmp(&b.ratio))
    }

    /// Takes in the samples.
    pub fn measured(&mut self, times: &Times, work: impl Into<Work>, roof: Option<&Roof>) {
        let work = work.into();
        self.samples_us = times.all();
        self.samples_per_round = times.rounds.iter().map(Vec::len).collect();
        self.samples_began_ns.clone_from(&times.began_ns);
        let Some(summary) = Summary::of(&self.samples_us) else { return };
        self.p50_us = Some(summary.p50_us);
        self.p90_us = Some(summary.p90_us);
        self.p99_us = Some(summary.p99_us);
        self.p50_interval_us = Some(summary.p50_interval_us);
        self.outliers = summary.outliers;
        let gflops = work.flops / summary.p50_us / 1e3;
        self.gflops = Some(gflops);
        self.gbps = Some(work.bytes / summary.p50_us / 1e3);
        // A GPU's peak is a data sheet's: only its roofline is said.
        let measured_peak = roof.filter(|_| self.device == DeviceId::Cpu);
        // What a call has reached the machine can do: a peak that was measured lower is none.
        self.percent_of_peak = measured_peak.map(|roof| (100.0 * gflops / roof.gflops).min(100.0));
        self.roofline = roof.map(|roof| roof.share(work, summary.p50_us).min(1.0));
    }

    /// Takes in samples from between foreign kernels.
    pub fn measured_between(&mut self, samples_us: &[f64]) {
        let Some(summary) = Summary::of(samples_us) else { return };
        self.between_p50_us = Some(summary.p50_us);
        self.between_p50_interval_us = Some(summary.p50_interval_us);
    }

    /// Takes its times away: a gate failed after they were taken.
    pub fn forget_times(&mut self) {
        let Self { kernel, baseline, device, problem, gates, variant, .. } = self;
        let (gates, variant) = (std::mem::take(gates), variant.take());
        *self = Self { gates, variant, ..Self::new(kernel, *baseline, *device, problem) };
    }

    /// The row without its samples.
    pub fn without_samples(&self) -> Self {
        Self {
            samples_us: Vec::new(),
            samples_per_round: Vec::new(),
            samples_began_ns: Vec::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is in documents of earlier versions stays readable, and is still written.
    #[test]
    fn documents_keep_their_names() {
        let row = Row::new("torch cudnn", true, DeviceId::Cuda(0), "mission bf16");
        let mut value = serde_json::to_value(&row).unwrap();
        assert_eq!((&value["peer"], &value["device"]), (&true.into(), &"cuda".into()));
        assert!(value.get("baseline").is_none());
        value["device"] = "cuda:0".into();
        assert_eq!(serde_json::from_value::<Row>(value).unwrap(), row);
    }
    /// The peaks were measured in a slower minute than the call.
    #[test]
    fn no_share_is_above_one() {
        let mut row = Row::new("cpu_flash", false, DeviceId::Cpu, "mission f32");
        let times = Times { rounds: vec![vec![1.0; 3]], began_ns: vec![0; 3] };
        let roof = Roof { gflops: 1e3, gbps: Some(1e3) };
        row.measured(&times, Work { flops: 4e6, bytes: 2e6 }, Some(&roof));
        assert_eq!((row.percent_of_peak, row.roofline), (Some(100.0), Some(1.0)));
        row.measured(&times, Work { flops: 5e5, bytes: 2e5 }, Some(&roof));
        assert_eq!((row.percent_of_peak, row.roofline), (Some(50.0), Some(0.5)));
    }
}
