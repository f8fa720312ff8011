//! One file per command.

pub(crate) mod apply;
pub(crate) mod bench;
pub(crate) mod build;
pub(crate) mod cache;
pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod kernels;
mod lengths;
mod mutation;
pub(crate) mod plan;
pub(crate) mod precompile;
pub(crate) mod profile;
pub(crate) mod repeat;
pub(crate) mod report;
pub(crate) mod runs;
pub(crate) mod sanitize;
pub(crate) mod tune;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use evosdpa::Isa;
use evosdpa_core::error::nearest;
use evosdpa_core::file::{self, Durability, write_whole};
use evosdpa_kernels::{Kernel, Origin, Registry, VariantId};
use evosdpa_lab::device::{Cpu, Cuda, Device, DeviceId, Sim, id};

use crate::args::{Common, Place};

/// A device, and why it is not a GPU where the choice was left open.
struct Opened {
    device: Box<dyn Device>,
    no_gpu: Option<String>,
}

impl Common {
    /// The device that was meant.
    fn open(&self) -> anyhow::Result<Opened> {
        self.open_with(registry(&self.kernel_path)?, None)
    }

    /// The same with these CUDA kernels, and another time limit for a launch on a GPU.
    fn open_with(&self, kernels: Registry, time_limit: Option<Duration>) -> anyhow::Result<Opened> {
        let isa = self.forced_isa()?;
        let cpu = || Box::new(Cpu { threads: self.thread_count(), isa });
        let open_cuda = |ordinal: usize| -> anyhow::Result<Cuda> {
            let cuda = Cuda::open(ordinal, kernels.clone())?;
            Ok(match time_limit {
                Some(limit) => cuda.with_limit(limit),
                None => cuda,
            })
        };
        let mut no_gpu = None;
        let device: Box<dyn Device> = match self.device {
            Place::On(DeviceId::Cpu) => cpu(),
            // A machine without a GPU, or without a compiler for it, still has a CPU.
            Place::Auto => match open_cuda(0) {
                Ok(cuda) => Box::new(cuda),
                Err(why) => {
                    no_gpu = Some(format!("{why:#}"));
                    cpu()
                }
            },
            Place::On(DeviceId::Sim) => Box::new(Sim::open(kernels)?),
            Place::On(DeviceId::Cuda(ordinal)) => Box::new(open_cuda(ordinal)?),
            Place::None => {
                return Err(refused_device(self.device, &["auto", "cpu", "cuda", "cuda:N", "sim"]));
            }
        };
        Ok(Opened { device, no_gpu })
    }

    /// The GPU of that number.
    fn open_cuda(&self, ordinal: usize) -> anyhow::Result<Cuda> {
        Ok(Cuda::open(ordinal, registry(&self.kernel_path)?)?)
    }

    /// The instruction set that CPU kernels are held to, if any.
    fn forced_isa(&self) -> anyhow::Result<Option<Isa>> {
        self.isa.as_deref().map(parse_isa).transpose()
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
fn chosen_kernels(
    device: &dyn Device,
    asked: &[String],
    kernel_path: &[PathBuf],
) -> anyhow::Result<Vec<String>> {
    if asked.is_empty() {
        return Ok(device.kernels().into_iter().map(|kernel| kernel.name).collect());
    }
    asked.iter().map(|name| chosen_kernel(device, name, kernel_path)).collect()
}

/// One kernel that was asked for.
fn chosen_kernel(device: &dyn Device, name: &str, kernel_path: &[PathBuf]) -> anyhow::Result<String> {
    let found = evosdpa_lab::find_kernel(device, name);
    let plain = VariantId::kernel_of(name);
    // A CPU does not know of the user's CUDA kernels: that they need a GPU is the reason, not their names.
    let is_theirs =
        || !kernel_path.is_empty() && registry(kernel_path).is_ok_and(|known| known.kernel(plain).is_ok());
    match found {
        Err(_) if device.id() == DeviceId::Cpu && is_theirs() => {
            Err(evosdpa_lab::Error::NeedsGpu { kernel: plain.to_owned() }.into())
        }
        found => Ok(found?),
    }
}

/// What this program was asked, for records: to be read, not to be run again.
fn own_arguments() -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    words.collect::<Vec<_>>().join(" ")
}

/// A file that the command line names.
fn read_file(path: &Path) -> anyhow::Result<Vec<u8>> {
    file::read(path, file::TEXT_BYTES_MAX).with_context(|| format!("cannot read {}", path.display()))
}

/// The same, of text.
fn read_text(path: &Path) -> anyhow::Result<String> {
    file::read_text(path, file::TEXT_BYTES_MAX).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes files into a folder, all of them or none, even where the program is killed meanwhile: they are written beside it and
/// renamed. What is there already is not written over.
fn write_files<N: AsRef<str>, T: AsRef<str>>(folder: &Path, files: &[(N, T)]) -> anyhow::Result<()> {
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_ref()).collect();
    if let Some(path) = names.iter().map(|name| folder.join(name)).find(|path| path.exists()) {
        anyhow::bail!("{} is there already: choose another folder with --out", path.display());
    }
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = if folder.is_dir() { folder } else { parent };
    let absent: Vec<&Path> = beside.ancestors().take_while(|path| !path.exists()).collect();
    let staging = beside.join(format!("{}{}", file::STAGING_PREFIX, std::process::id()));
    let write = |(name, text): &(N, T)| {
        let path = staging.join(name.as_ref());
        std::fs::create_dir_all(path.parent().unwrap_or(&staging))
            .and_then(|()| write_whole(&path, &[text.as_ref().as_bytes()], Durability::Synced))
            .with_context(|| format!("cannot write {}", folder.join(name.as_ref()).display()))
    };
    let done = files.iter().try_for_each(write).and_then(|()| {
        publish(&staging, folder, &names).with_context(|| format!("cannot write {}", folder.display()))
    });
    let _ = std::fs::remove_dir_all(&staging);
    if done.is_err() {
        // Folders with something in them stay.
        absent.iter().for_each(|made| drop(std::fs::remove_dir(made)));
    }
    done
}

/// Moves what was staged to its place: in one step where there is no such folder yet.
fn publish(staging: &Path, folder: &Path, names: &[&str]) -> std::io::Result<()> {
    if !folder.is_dir() {
        return std::fs::rename(staging, folder);
    }
    let moved = names.iter().try_for_each(|name| {
        let to = folder.join(name);
        std::fs::create_dir_all(to.parent().unwrap_or(folder))?;
        std::fs::rename(staging.join(name), to)
    });
    if moved.is_err() {
        // None of them was there before.
        names.iter().for_each(|name| drop(std::fs::remove_file(folder.join(name))));
    }
    moved
}

/// The CUDA kernels there are: the shipped ones and those of the user's folders.
fn registry(kernel_path: &[PathBuf]) -> anyhow::Result<Registry> {
    let mut registry = Registry::embedded()?;
    for folder in kernel_path {
        let before = registry.kernels().count();
        registry.add_folder(folder).context("--kernel-path")?;
        anyhow::ensure!(
            registry.kernels().count() > before,
            "--kernel-path: there is no kernel in {}: expected NAME.toml with its NAME.cu, as examples/custom-kernel has them",
            folder.display()
        );
    }
    Ok(registry)
}

/// The CUDA kernels that were asked for. When none was: those of the user's folders, and without such all.
fn chosen_cuda_kernels<'a>(registry: &'a Registry, asked: &[String]) -> anyhow::Result<Vec<&'a Kernel>> {
    if !asked.is_empty() {
        return Ok(asked.iter().map(|name| registry.kernel(name)).collect::<Result<_, _>>()?);
    }
    let own: Vec<&Kernel> = registry.kernels().filter(|kernel| kernel.origin != Origin::Embedded).collect();
    let chosen = if own.is_empty() { registry.kernels().collect() } else { own };
    if chosen.is_empty() {
        return Err(evosdpa_kernels::Error::Empty.into());
    }
    Ok(chosen)
}

/// A device that this command has no use for.
fn refused_device(place: impl ToString, allowed: &[&str]) -> anyhow::Error {
    anyhow::Error::from(id::unknown(&place.to_string(), allowed)).context("--device")
}
