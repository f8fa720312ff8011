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
use evosdpa_kernels::Registry;
use evosdpa_lab::device::{Cpu, Cuda, Device};

use crate::args::Common;

impl Common {
    /// The device that was meant.
    fn open(&self) -> anyhow::Result<Box<dyn Device>> {
        let isa = self.isa.as_deref().map(parse_isa).transpose()?;
        let cpu = || Box::new(Cpu { threads: self.thread_count(), isa });
        match self.device.as_str() {
            "cpu" => Ok(cpu()),
            // A machine without a GPU, or without a compiler for it, still has a CPU.
            "auto" => Ok(self.open_cuda(0).map_or_else(|_| cpu() as Box<dyn Device>, |cuda| Box::new(cuda))),
            "cuda" => Ok(Box::new(self.open_cuda(0)?)),
            other => match other.strip_prefix("cuda:").and_then(|number| number.parse().ok()) {
                Some(ordinal) => Ok(Box::new(self.open_cuda(ordinal)?)),
                None => Err(evosdpa_core::Error::UnknownName {
                    kind: "device",
                    name: other.to_owned(),
                    nearest: nearest(other, ["auto", "cpu", "cuda"]),
                    allowed: "auto, cpu, cuda, cuda:N".to_owned(),
                })
                .context("--device"),
            },
        }
    }

    fn open_cuda(&self, ordinal: usize) -> anyhow::Result<Cuda> {
        Ok(Cuda::open(ordinal, self.registry()?)?)
    }

    /// The kernels that come with the program, and the user's own.
    fn registry(&self) -> anyhow::Result<Registry> {
        let mut registry = Registry::embedded()?;
        if let Some(folder) = &self.kernel_path {
            registry.add_folder(folder)?;
        }
        Ok(registry)
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
fn chosen_kernels(device: &dyn Device, asked: &[String]) -> anyhow::Result<Vec<String>> {
    if asked.is_empty() {
        return Ok(device.kernels().into_iter().map(|kernel| kernel.name).collect());
    }
    Ok(asked.iter().map(|name| evosdpa_lab::find_kernel(device, name)).collect::<Result<_, _>>()?)
}
