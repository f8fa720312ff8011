//! A GPU with the kernels that may be chosen for it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard},
};

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::{Builder, Device, Function, PreparedLaunch, RawStream};
use evosdpa_kernels::{Registry, Target, Variant, VariantId};

use super::{
    maps::RecentMaps,
    plan::{OnGpu, Plans},
};
use crate::{
    Attention, DeviceTensors, Error, Options,
    choose::{Choice, Planner, Question},
};

/// A GPU that computes attention: what is compiled, loaded and planned on it is kept here.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    target: Target,
    builder: Builder,
    planner: RwLock<Planner>,
    /// Of every plan that asks for none of its own.
    plans: Arc<Plans>,
    /// Tensor maps of the last launches.
    recent_maps: RecentMaps,
    /// What writes to caches, by the type of their elements.
    pub(super) cache_kernels: RwLock<HashMap<DType, Arc<PreparedLaunch>>>,
}

/// The GPUs that [`shared`] has opened, by number. They are kept for the life of the process: other users of the device may
/// still be at work when the process ends, and must find their context as they left it.
static SHARED: RwLock<Vec<Option<Arc<Gpu>>>> = RwLock::new(Vec::new());

/// Only one thread opens a GPU.
static OPENING: Mutex<()> = Mutex::new(());

/// The GPU `cuda:N`, opened by the first call and shared by the whole process.
pub fn shared(ordinal: usize) -> Result<Arc<Gpu>, Error> {
    let find = || {
        let shared = SHARED.read().unwrap_or_else(PoisonError::into_inner);
        shared.get(ordinal).cloned().flatten()
    };
    if let Some(gpu) = find() {
        return Ok(gpu);
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = find() {
        return Ok(gpu);
    }
    let planner = Planner::with_tables(Registry::embedded()?)?;
    let gpu = Arc::new(Gpu::open(ordinal, planner, Builder::new()?)?);
    let mut shared = SHARED.write().unwrap_or_else(PoisonError::into_inner);
    if shared.len() <= ordinal {
        shared.resize(ordinal + 1, None);
    }
    shared[ordinal] = Some(Arc::clone(&gpu));
    Ok(gpu)
}

impl Gpu {
    /// Opens `cuda:N` with a planner and a builder of your own; [`shared`] has those of everyone. It uses the device's primary
    /// context, as PyTorch does, and leaves every thread's current context as it finds it.
    pub fn open(ordinal: usize, planner: Planner, builder: Builder) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        let (target, plans) = (device.target()?, Arc::new(Plans::new(&device, None)));
        let (planner, cache_kernels) = (RwLock::new(planner), RwLock::default());
        let recent_maps = RecentMaps::default();
        Ok(Self { device, target, builder, planner, plans, recent_maps, cache_kernels })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is compiled for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The kernels it has.
    pub fn registry(&self) -> Registry {
        self.planner().registry().clone()
    }

    /// Takes in another source for a kernel, under a name of its own; everything else stays as its manifest says.
    pub fn register_source(&self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        let mut planner = self.planner.write().unwrap_or_else(PoisonError::into_inner);
        Ok(planner.registry_mut().register_source(of, name, source)?)
    }

    /// What such tensors would be computed with, and why not with something else. Compiles nothing.
    pub fn explain(&self, problem: &Problem, tensors: &DeviceTensors) -> Result<Choice, Error> {
        self.planner().choose(&self.question(problem, tensors))
    }

    /// Chooses, compiles and loads what a call with such tensors needs. The addresses need not be those of the call, but
    /// as well aligned. What was planned before is only looked up, in a few dozen nanoseconds.
    pub fn plan(
        self: &Arc<Self>,
        problem: &Problem,
        tensors: &DeviceTensors,
        options: &Options,
    ) -> Result<Attention, Error> {
        tensors.check(problem)?;
        let plans = match &options.variant {
            None if !options.isolated => Arc::clone(&self.plans),
            forced => Arc::new(Plans::new(&self.device, forced.clone())),
        };
        Ok(Attention::on_gpu(*problem, OnGpu::new(self, plans, problem, tensors)?))
    }

    /// Plans and queues at once: [`Gpu::plan`] and [`Attention::run_on`] for who has a problem anew at every call.
    ///
    /// # Safety
    /// As [`Attention::run_on`].
    pub unsafe fn run(
        &self,
        problem: &Problem,
        tensors: &DeviceTensors,
        stream: RawStream,
    ) -> Result<(), Error> {
        tensors.check(problem)?;
        // SAFETY: this function's contract is the same.
        unsafe { self.plans.run(self, problem, tensors, stream) }
    }

    pub(super) fn recent_maps(&self) -> &RecentMaps {
        &self.recent_maps
    }

    /// The variant's entry point, compiled and loaded.
    pub(super) fn loaded(&self, variant: &Variant) -> Result<Function, Error> {
        Ok(self.builder.load(&self.device, variant)?)
    }

    /// The variant that was asked for, or the one to choose.
    pub(super) fn variant(
        &self,
        forced: Option<&VariantId>,
        problem: &Problem,
        tensors: &DeviceTensors,
    ) -> Result<Variant, Error> {
        let (planner, question) = (self.planner(), self.question(problem, tensors));
        match forced {
            Some(id) => planner.forced(&question, id),
            None => Ok(planner.choose_quickly(&question)?.variant),
        }
    }

    fn planner(&self) -> RwLockReadGuard<'_, Planner> {
        self.planner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn question<'a>(&'a self, problem: &'a Problem, tensors: &'a DeviceTensors) -> Question<'a> {
        Question { problem, tensors, target: &self.target, device: Some(&self.device.info().name) }
    }
}
