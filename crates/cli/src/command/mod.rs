//! One file per command.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod kernels;
pub(crate) mod runs;

use anyhow::Context;
use evosdpa::Isa;
use evosdpa_core::error::nearest;
use evosdpa_lab::device::{Cpu, Device};

use crate::args::Common;

impl Common {
    /// The device that was meant.
    fn open(&self) -> anyhow::Result<Box<dyn Device>> {
        let isa = self.isa.as_deref().map(parse_isa).transpose()?;
        match self.device.as_str() {
            "auto" | "cpu" => Ok(Box::new(Cpu { threads: self.thread_count(), isa })),
            other => Err(evosdpa_core::Error::UnknownName {
                kind: "device",
                name: other.to_owned(),
                nearest: nearest(other, ["auto", "cpu"]),
                allowed: "auto, cpu".to_owned(),
            })
            .context("--device"),
        }
    }

    fn thread_count(&self) -> Option<usize> {
        self.threads.map(|threads| threads as usize)
    }
}

fn parse_isa(name: &str) -> anyhow::Result<Isa> {
    let isa = Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
        evosdpa_core::Error::UnknownName {
            kind: "instruction set",
            name: name.to_owned(),
            nearest: nearest(name, Isa::ALL.iter().map(|isa| isa.name())),
            allowed: Isa::ALL.map(Isa::name).join(", "),
        }
    })?;
    let available: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
    anyhow::ensure!(isa.is_available(), "this machine has no {name}; it has {}", available.join(", "));
    Ok(isa)
}

/// The kernels that were asked for; all of the device's when none was.
fn chosen_kernels(device: &dyn Device, asked: &[String]) -> anyhow::Result<Vec<&'static str>> {
    if asked.is_empty() {
        return Ok(device.kernels().iter().map(|kernel| kernel.name).collect());
    }
    let names = evosdpa_lab::kernel_names(device);
    Ok(asked.iter().map(|name| names.find(name)).collect::<Result<_, _>>()?)
}
