//! Plans: everything about a call that does not depend on its pointers, made once and kept.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use evosdpa_core::Problem;
use evosdpa_cuda::{Counters, Device, Function, PreparedLaunch, RawStream, RelaxedCapture, TensorMap};
use evosdpa_kernels::{ProblemFacts, TensorMapUse, Variant, VariantId};

use super::{DeviceSide, DeviceTensors, Gpu};
use crate::Error;

/// Past this many plans all are made anew: who asks for so many problems does not come back to the first ones soon. The
/// kernels stay loaded, so a plan costs well under a millisecond then.
const PLANS_MAX: usize = 4096;

/// Plans with the code they share.
#[derive(Debug)]
pub(super) struct Plans {
    /// What every plan must use; `None` leaves the choice open.
    forced: Option<VariantId>,
    made: RwLock<HashMap<Key, Arc<Plan>>>,
    /// Loaded kernels. Its lock is held while one is compiled, so that no kernel is compiled twice.
    loaded: Mutex<HashMap<Code, Function>>,
    /// Of every plan, and kept as long as the kernels: a caller's graphs may hold them when the plans are gone.
    counters: Arc<Counters>,
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    facts: ProblemFacts,
    /// Of Q, K, V and O: tensor maps hold them.
    strides: [[i64; 3]; 4],
    /// See [`DeviceTensors::alignment_class`].
    alignment: u8,
}

/// What compiled code depends on, given the kernels of one registry and one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Code {
    kernel: String,
    defines: BTreeMap<String, i64>,
}

/// A problem with its kernel, compiled, loaded and ready to launch. Small: there may be thousands.
#[derive(Debug)]
struct Plan {
    variant: VariantId,
    /// For the tensors it was planned with; a call moves them to its own.
    tensor_maps: Vec<(TensorMapUse, TensorMap)>,
    prepared: PreparedLaunch,
}

/// A problem's plan on a GPU, and where to find another if the tensors are strided or aligned in another way.
#[derive(Clone, Debug)]
pub struct OnGpu {
    gpu: Arc<Gpu>,
    plans: Arc<Plans>,
    key: Key,
    plan: Arc<Plan>,
}

impl OnGpu {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        plans: Arc<Plans>,
        problem: &Problem,
        tensors: &DeviceTensors,
    ) -> Result<Self, Error> {
        let key = Key::of(problem, tensors)?;
        let plan = plans.plan(gpu, key, problem, tensors)?;
        Ok(Self { gpu: Arc::clone(gpu), plans, key, plan })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The kernel with its tunables.
    pub fn variant(&self) -> &VariantId {
        &self.plan.variant
    }

    /// The kernel with its launch: `sdpa_v2b[STAGES=2]: grid 8x8x1, block 256x1x1, …`.
    pub fn describe(&self) -> String {
        self.plan.prepared.describe()
    }

    /// Whether every work counter was left at 0, as kernels must. Ask when no launch is under way.
    pub fn check_counters(&self) -> Result<(), Error> {
        Ok(self.plans.counters.check(self.plan.prepared.function().label())?)
    }

    /// Gives the work counters of captured launches out again. Only for an [isolated](crate::Options::isolated) plan, and
    /// when no graph that captured one of its launches is left.
    pub fn reuse_captured_counters(&self) {
        self.plans.counters.reuse_captured();
    }

    /// # Safety
    /// As for [`crate::Attention::run_on`].
    pub(crate) unsafe fn launch(
        &self,
        problem: &Problem,
        tensors: &DeviceTensors,
        stream: RawStream,
    ) -> Result<(), Error> {
        tensors.check(problem)?;
        let key = Key::of(problem, tensors)?;
        if key == self.key {
            // SAFETY: this function's contract is the same.
            return unsafe { self.plan.launch(&self.gpu, problem, tensors, stream) };
        }
        // SAFETY: as above.
        unsafe { self.plans.run(&self.gpu, problem, tensors, stream) }
    }
}

impl Key {
    fn of(problem: &Problem, tensors: &DeviceTensors) -> Result<Self, Error> {
        let mut facts = ProblemFacts::try_from(problem)?;
        facts.lse = tensors.lse.is_some();
        let DeviceTensors { q, k, v, o, .. } = tensors;
        let strides = [q.strides, k.strides, v.strides, o.strides];
        Ok(Self { facts, strides, alignment: tensors.alignment_class(problem) })
    }
}

impl Plans {
    pub(super) fn new(device: &Device, forced: Option<VariantId>) -> Self {
        let counters = Arc::new(Counters::new(device));
        Self { forced, made: RwLock::default(), loaded: Mutex::default(), counters }
    }

    /// # Safety
    /// As for [`crate::Attention::run_on`]; the tensors must have been checked.
    pub(super) unsafe fn run(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        tensors: &DeviceTensors,
        stream: RawStream,
    ) -> Result<(), Error> {
        let plan = self.plan(gpu, Key::of(problem, tensors)?, problem, tensors)?;
        // SAFETY: this function's contract is the same.
        unsafe { plan.launch(gpu, problem, tensors, stream) }
    }

    fn plan(
        &self,
        gpu: &Gpu,
        key: Key,
        problem: &Problem,
        tensors: &DeviceTensors,
    ) -> Result<Arc<Plan>, Error> {
        let known = self.made.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        match known {
            Some(plan) => Ok(plan),
            None => self.make(gpu, key, problem, tensors),
        }
    }

    #[cold]
    fn make(
        &self,
        gpu: &Gpu,
        key: Key,
        problem: &Problem,
        tensors: &DeviceTensors,
    ) -> Result<Arc<Plan>, Error> {
        let variant = gpu.variant(self.forced.as_ref(), problem, tensors)?;
        let prepared = self.prepared(gpu, &variant)?;
        let tensor_maps = variant
            .tensor_maps
            .iter()
            .map(|wanted| {
                let request = tensors.tensor_map(problem, wanted)?;
                Ok((*wanted, TensorMap::encode(gpu.device(), &request)?))
            })
            .collect::<Result<_, Error>>()?;
        let plan = Arc::new(Plan { variant: variant.id, tensor_maps, prepared });
        let mut made = self.made.write().unwrap_or_else(PoisonError::into_inner);
        if made.len() >= PLANS_MAX {
            made.clear();
        }
        // Two threads may have made the same plan; either will do.
        made.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Compiled, loaded and checked against the device: all that must not happen in a later call.
    fn prepared(&self, gpu: &Gpu, variant: &Variant) -> Result<PreparedLaunch, Error> {
        let count = variant.tensor_maps.len();
        if count > PreparedLaunch::TENSOR_MAPS_MAX {
            return Err(Error::TensorMapCount { kernel: variant.id.kernel.clone(), count });
        }
        let entered = gpu.device().enter()?;
        // The first call of a problem may come while its caller captures a graph.
        let _relaxed = RelaxedCapture::begin(&entered)?;
        let code = Code { kernel: variant.id.kernel.clone(), defines: variant.defines.clone() };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match loaded.get(&code) {
            Some(function) => function.clone(),
            None => {
                let artifact = gpu.builder().build(variant)?;
                let function =
                    gpu.device().load(&artifact.code, &artifact.label)?.function(&variant.entry)?;
                loaded.insert(code, function.clone());
                function
            }
        };
        Ok(PreparedLaunch::sharing(&function, variant.launch, &self.counters)?)
    }
}

impl Plan {
    /// # Safety
    /// As for [`crate::Attention::run_on`]; the tensors must be strided and aligned as those of the plan.
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        tensors: &DeviceTensors,
        stream: RawStream,
    ) -> Result<(), Error> {
        let params = tensors.params(problem);
        let entered = gpu.device().enter()?;
        let mut maps = [TensorMap::EMPTY; PreparedLaunch::TENSOR_MAPS_MAX];
        // How many tokens, pages or blocks there are, only the call says.
        let DeviceSide { queries, keys, pages, indices, .. } = tensors.side;
        let same_sizes = queries.is_none() && keys.is_none() && pages.is_none() && indices.is_none();
        for (map, (wanted, planned)) in maps.iter_mut().zip(&self.tensor_maps) {
            let request = tensors.tensor_map(problem, wanted)?;
            *map = gpu.recent_maps().find_or(&request, || match same_sizes {
                true => planned.moved_to(&entered, request.name, request.address),
                false => TensorMap::encode_in(&entered, &request),
            })?;
        }
        // SAFETY: parameters and maps describe the caller's memory and stream, which this function's contract covers; the
        // kernel takes as many maps as its manifest lists, and the plan has made sure that they fit.
        unsafe { self.prepared.launch_on(&entered, stream, &params, &maps[..self.tensor_maps.len()]) }?;
        Ok(())
    }
}
