//! Plans: everything about a call that does not depend on its pointers, made once and kept.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use evosdpa_core::Problem;
use evosdpa_cuda::{
    Builder, Counters, Device, Function, PreparedLaunch, RawStream, RelaxedCapture, TensorMap,
};
use evosdpa_kernels::{ProblemFacts, Registry, Target, TensorName, Variant};

use crate::{
    DeviceTensors, Error,
    planner::{Choice, Origin, Planner, Question},
};

/// Past this many plans all are made anew: who asks for so many problems does not come back to the first ones soon. The
/// kernels stay loaded, so a plan costs well under a millisecond then.
const PLANS_MAX: usize = 4096;

/// A GPU that computes attention.
///
/// ```no_run
/// use evosdpa::{DType, DeviceTensors, Problem, gpu};
///
/// # fn main() -> Result<(), evosdpa::Error> {
/// # let (q, k, v, o, stream) = (0, 0, 0, 0, 0);
/// let problem = Problem::new("b2h32/8s4096d128:causal".parse()?, DType::BF16)?;
/// // Device addresses of your own tensors; strides of your own are as good.
/// let tensors = DeviceTensors::packed(&problem, [q, k, v, o], None);
/// // SAFETY: the addresses are device memory of these sizes until the stream has come past the launch.
/// unsafe { gpu::forward(0, &problem, &tensors, gpu::RawStream(stream)) }?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    target: Target,
    builder: Builder,
    planner: Planner,
    plans: RwLock<HashMap<Key, Arc<Plan>>>,
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
    planned: Planned,
    /// For the tensors it was planned with; a call moves them to its own.
    tensor_maps: Vec<(TensorName, TensorMap)>,
    prepared: PreparedLaunch,
}

/// What a problem was planned with.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The kernel.
    pub kernel: String,
    /// The kernel with its tunables: `sdpa_v2b[STAGES=2]`.
    pub label: String,
    /// Where the choice came from.
    pub origin: Origin,
}

impl Gpu {
    /// Opens `cuda:N` with the kernels and tuned tables that there are. It uses the device's primary context, as PyTorch does, and
    /// leaves every thread's current context as it finds it.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Self::open_with(ordinal, Planner::with_tables(Registry::embedded()?)?)
    }

    /// Opens `cuda:N` with a planner of your own.
    pub fn open_with(ordinal: usize, planner: Planner) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        Ok(Self {
            target: device.target()?,
            counters: Arc::new(Counters::new(&device)),
            device,
            builder: Builder::new()?,
            planner,
            plans: RwLock::default(),
            loaded: Mutex::default(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Chooses, compiles and loads what a later call with such tensors needs, and says what was chosen. The addresses
    /// need not be those of the call, but as well aligned.
    pub fn prepare(&self, problem: &Problem, tensors: &DeviceTensors) -> Result<Planned, Error> {
        tensors.check(problem)?;
        Ok(self.plan(problem, tensors)?.planned.clone())
    }

    /// What a call with such tensors runs, and why not something else. Compiles nothing.
    pub fn explain(&self, problem: &Problem, tensors: &DeviceTensors) -> Result<Choice, Error> {
        self.planner.choose(&self.question(problem, tensors))
    }

    fn question<'a>(&'a self, problem: &'a Problem, tensors: &'a DeviceTensors) -> Question<'a> {
        Question { problem, tensors, target: &self.target, device: Some(&self.device.info().name) }
    }

    /// Computes attention on the caller's stream. The log-sum-exp is written when the tensors have a place for it.
    ///
    /// Returns when the launch is queued. Tensors that do not fit the problem are refused before anything is queued;
    /// tensors that a fast kernel cannot read (unaligned, repeated) go to one that can.
    ///
    /// Rows that see no key give O = 0 and LSE = −∞. A visible score that is NaN or +∞ makes its row NaN.
    ///
    /// # Safety
    /// Every address must be memory of this device that is valid for the problem's sizes and the given strides, and stay
    /// so until the stream has come past the launch; outputs must not overlap inputs or each other. The stream must be a
    /// live one of the device's primary context, or 0.
    pub unsafe fn forward(
        &self,
        problem: &Problem,
        tensors: &DeviceTensors,
        stream: RawStream,
    ) -> Result<(), Error> {
        tensors.check(problem)?;
        let plan = self.plan(problem, tensors)?;
        let params = tensors.params(problem);
        let entered = self.device.enter()?;
        let mut maps = [TensorMap::EMPTY; PreparedLaunch::TENSOR_MAPS_MAX];
        for (map, (tensor, planned)) in maps.iter_mut().zip(&plan.tensor_maps) {
            let (name, tensor) = tensors.named(*tensor);
            *map = planned.moved_to(&entered, name, tensor.address)?;
        }
        // SAFETY: parameters and maps describe the caller's memory and stream, which this function's contract covers; the
        // kernel takes as many maps as its manifest lists, and the plan has made sure that they fit.
        unsafe { plan.prepared.launch_on(&entered, stream, &params, &maps[..plan.tensor_maps.len()]) }?;
        Ok(())
    }

    fn plan(&self, problem: &Problem, tensors: &DeviceTensors) -> Result<Arc<Plan>, Error> {
        let mut facts = ProblemFacts::try_from(problem)?;
        facts.lse = tensors.lse.is_some();
        let DeviceTensors { q, k, v, o, .. } = tensors;
        let strides = [q.strides, k.strides, v.strides, o.strides];
        let key = Key { facts, strides, alignment: tensors.alignment_class(problem) };
        let known = self.plans.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        match known {
            Some(plan) => Ok(plan),
            None => self.make_plan(key, problem, tensors),
        }
    }

    #[cold]
    fn make_plan(&self, key: Key, problem: &Problem, tensors: &DeviceTensors) -> Result<Arc<Plan>, Error> {
        let Choice { variant, origin, .. } = self.planner.choose_quickly(&self.question(problem, tensors))?;
        let prepared = self.prepared(&variant)?;
        let tensor_maps = variant
            .tensor_maps
            .iter()
            .map(|wanted| {
                let request = tensors.tensor_map(problem, wanted)?;
                Ok((wanted.tensor, TensorMap::encode(&self.device, &request)?))
            })
            .collect::<Result<_, Error>>()?;
        let planned = Planned { label: variant.label(), kernel: variant.id.kernel, origin };
        let plan = Arc::new(Plan { planned, tensor_maps, prepared });
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= PLANS_MAX {
            plans.clear();
        }
        // Two threads may have made the same plan; either will do.
        plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Compiled, loaded and checked against the device: all that must not happen in a later call.
    fn prepared(&self, variant: &Variant) -> Result<PreparedLaunch, Error> {
        let count = variant.tensor_maps.len();
        if count > PreparedLaunch::TENSOR_MAPS_MAX {
            return Err(Error::TensorMapCount { kernel: variant.id.kernel.clone(), count });
        }
        let entered = self.device.enter()?;
        // The first call of a problem may come while its caller captures a graph.
        let _relaxed = RelaxedCapture::begin(&entered)?;
        let code = Code { kernel: variant.id.kernel.clone(), defines: variant.defines.clone() };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match loaded.get(&code) {
            Some(function) => function.clone(),
            None => {
                let function = load(&self.device, &self.builder, variant)?;
                loaded.insert(code, function.clone());
                function
            }
        };
        Ok(PreparedLaunch::sharing(&function, variant.launch, &self.counters)?)
    }
}

/// Compiles a variant, or takes it from the cache, and loads it.
pub fn load(device: &Device, builder: &Builder, variant: &Variant) -> evosdpa_cuda::Result<Function> {
    let artifact = builder.build(variant)?;
    device.load(&artifact.code, &artifact.label)?.function(&variant.entry)
}
