//! Plans: everything about a call that does not depend on its pointers, made once and kept.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use evosdpa_core::Problem;
use evosdpa_cuda::{Counters, Device, Function, PreparedLaunch, RawStream, RelaxedCapture, TensorMap};
use evosdpa_kernels::{ProblemFacts, SdpaParams, TensorMapUse, Variant, VariantId};

use super::{
    DeviceScales, DeviceTensors, Gpu,
    maps::{MapKey, PlanNumber},
};
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
    number: PlanNumber,
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
    /// What calls have that differ from the planned one in their addresses alone; `None` where there is more to look at.
    moved: Option<Moved>,
}

/// A call whose tensors were checked and looked at, for others that lie elsewhere. Most calls are such, and looking again would
/// take as long as all the rest that is done here.
#[derive(Clone, Debug)]
struct Moved {
    tensors: DeviceTensors,
    params: SdpaParams,
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
        Ok(Self { gpu: Arc::clone(gpu), plans, key, plan, moved: Moved::new(problem, tensors) })
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
        if let Some(params) = self.moved.as_ref().and_then(|moved| moved.params(tensors)) {
            // SAFETY: this function's contract is the same.
            return unsafe { self.plan.launch_with(&self.gpu, problem, tensors, &params, stream) };
        }
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

/// Of addresses: what TMA asks of them, and more than any element does.
const ALIGNED_BYTES: u64 = 16;

/// Of what lists and scales hold.
const WORD_BYTES: u64 = 4;

impl Moved {
    /// Of tensors that were checked, unless a block table is beside them.
    fn new(problem: &Problem, tensors: &DeviceTensors) -> Option<Self> {
        let moved = Self { tensors: *tensors, params: tensors.params(problem) };
        (tensors.side.blocks.is_none() && are_aligned(tensors)).then_some(moved)
    }

    /// The parameters of a call, if its tensors differ in nothing that was checked.
    fn params(&self, tensors: &DeviceTensors) -> Option<SdpaParams> {
        let DeviceTensors { q, k, v, o, lse, scales, side } = tensors;
        let planned = &self.tensors;
        let same = q.strides == planned.q.strides
            && k.strides == planned.k.strides
            && v.strides == planned.v.strides
            && o.strides == planned.o.strides
            && lse.map(|lse| lse.strides) == planned.lse.map(|lse| lse.strides)
            && scales.map(DeviceScales::are_there) == planned.scales.map(DeviceScales::are_there)
            && side.has_form_of(&planned.side);
        if !same || !are_aligned(tensors) {
            return None;
        }
        let lse = lse.map_or(0, |lse| lse.address);
        let DeviceScales { q: q_scale, k: k_scale, v: v_scale } = scales.unwrap_or_default();
        let (q, k, v, o) = (q.address, k.address, v.address, o.address);
        let mut params = SdpaParams { q, k, v, o, lse, q_scale, k_scale, v_scale, ..self.params };
        side.place(&mut params);
        Some(params)
    }
}

/// Whether tensors have memory that every kernel reaches, and lists and scales that can be read.
fn are_aligned(tensors: &DeviceTensors) -> bool {
    let DeviceTensors { q, k, v, o, lse, scales, side } = tensors;
    let lse = lse.map_or(ALIGNED_BYTES, |lse| lse.address);
    let scales = scales.unwrap_or_default();
    let is_reached = |address: u64| address != 0 && address.is_multiple_of(ALIGNED_BYTES);
    let dense = [side.bias, side.mask].into_iter().flatten();
    [q.address, k.address, v.address, o.address, lse].into_iter().all(is_reached)
        && dense.map(|dense| dense.address).all(is_reached)
        && side.lists().into_iter().flatten().all(|address| address != 0 && address.is_multiple_of(WORD_BYTES))
        // Of a tensor without codes there are none: 0.
        && [scales.q, scales.k, scales.v].into_iter().all(|address| address.is_multiple_of(WORD_BYTES))
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
        let number = PlanNumber::new();
        let plan = Arc::new(Plan { number, variant: variant.id, tensor_maps, prepared });
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
                let function = gpu.loaded(variant)?;
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
        // SAFETY: this function's contract is the same.
        unsafe { self.launch_with(gpu, problem, tensors, &tensors.params(problem), stream) }
    }

    /// # Safety
    /// As [`Plan::launch`]; the parameters must be those of the tensors.
    unsafe fn launch_with(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        tensors: &DeviceTensors,
        params: &SdpaParams,
        stream: RawStream,
    ) -> Result<(), Error> {
        let entered = gpu.device().enter()?;
        let mut maps = [TensorMap::EMPTY; PreparedLaunch::TENSOR_MAPS_MAX];
        let maps = &mut maps[..self.tensor_maps.len()];
        let keys = (0..).zip(&self.tensor_maps).map(|(map, (wanted, _))| MapKey {
            plan: self.number,
            map,
            address: tensors.named(wanted.tensor).1.address,
            counts: tensors.counts(wanted.tensor),
        });
        if !gpu.recent_maps().find(keys.clone(), maps) {
            for ((key, place), (wanted, planned)) in keys.zip(maps.iter_mut()).zip(&self.tensor_maps) {
                let request = tensors.tensor_map(problem, wanted)?;
                // How many tokens, pages or blocks there are, only the call says.
                *place = match key.counts {
                    [0, 0] => planned.moved_to(&entered, request.name, request.address),
                    _ => TensorMap::encode_in(&entered, &request),
                }?;
                gpu.recent_maps().keep(key, *place);
            }
        }
        // SAFETY: parameters and maps describe the caller's memory and stream, which this function's contract covers; the
        // kernel takes as many maps as its manifest lists, and the plan has made sure that they fit.
        unsafe { self.prepared.launch_on(&entered, stream, params, maps) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;

    use super::*;
    use crate::{DeviceLse, choose::assumed_tensors, gpu::DeviceSide};

    fn planned() -> (Problem, DeviceTensors) {
        let problem = Problem::new("b2h4s8d64:causal".parse().unwrap(), DType::BF16).unwrap();
        (problem, DeviceTensors::packed(&problem, [0x1000, 0x2000, 0x3000, 0x4000], Some(0x5000)))
    }

    #[test]
    fn a_call_that_only_lies_elsewhere_has_its_own_parameters_at_once() {
        let (problem, tensors) = planned();
        let moved = Moved::new(&problem, &tensors).unwrap();
        let elsewhere = DeviceTensors::packed(&problem, [0x10, 0x20, 0x30, 0x40], Some(0x50));
        assert_eq!(moved.params(&elsewhere), Some(elsewhere.params(&problem)));
    }

    #[test]
    fn a_call_that_differs_in_more_is_looked_at_anew() {
        let (problem, tensors) = planned();
        let moved = Moved::new(&problem, &tensors).unwrap();
        type Change = fn(&mut DeviceTensors);
        let changes: [Change; 12] = [
            |t| t.q.address = 0,
            |t| t.k.address += 8,
            |t| t.v.address += 2,
            |t| t.o.address += 8,
            |t| t.q.strides[0] += 8,
            |t| t.k.strides[1] = 0,
            |t| t.v.strides[2] = -64,
            |t| t.o.strides[1] = 8,
            |t| t.lse = None,
            |t| t.lse = t.lse.map(|lse| DeviceLse { strides: [0, 8], ..lse }),
            |t| t.scales = Some(DeviceScales { q: 0, k: 64, v: 64 }),
            |t| t.side.sinks = Some(0x6000),
        ];
        for change in changes {
            let mut other = tensors;
            change(&mut other);
            assert_eq!(moved.params(&other), None, "{other:?}");
        }
        // Nor is anything kept of a call that has more to look at.
        let blocks = Problem::new("b2h4s8d64:blocks=128".parse().unwrap(), DType::BF16).unwrap();
        assert!(Moved::new(&blocks, &assumed_tensors(&blocks)).is_none());
    }

    #[test]
    fn a_bias_and_a_mask_lie_elsewhere_but_are_of_one_form() {
        let problem = Problem::new("b2h4s8d64:bias:mask".parse().unwrap(), DType::BF16).unwrap();
        let tensors = assumed_tensors(&problem);
        let moved = Moved::new(&problem, &tensors).unwrap();
        let mut elsewhere = tensors;
        elsewhere.side.bias.as_mut().unwrap().address = 0x70;
        elsewhere.side.mask.as_mut().unwrap().address = 0x80;
        assert_eq!(moved.params(&elsewhere), Some(elsewhere.params(&problem)));
        type Change = fn(&mut DeviceSide);
        let changes: [Change; 8] = [
            |side| side.bias = None,
            |side| side.mask = None,
            |side| side.bias.as_mut().unwrap().dtype = DType::F32,
            |side| side.bias.as_mut().unwrap().strides[2] += 8,
            |side| side.mask.as_mut().unwrap().strides[0] += 8,
            |side| side.mask.as_mut().unwrap().address = 0,
            |side| side.mask.as_mut().unwrap().address += 1,
            |side| side.bias.as_mut().unwrap().address += 2,
        ];
        for change in changes {
            let mut other = tensors;
            change(&mut other.side);
            assert_eq!(moved.params(&other), None, "{:?}", other.side);
        }
    }

    /// A call over a paged cache of codes with everything that lists can say, and where such a call puts each thing.
    fn served() -> (Problem, DeviceTensors) {
        let shape = "b3h4/2s9/33d16:varlen=q:used:used-q:leftpad:indexed:paged=16:alibi:sinks:kv=e4m3";
        let problem = Problem::new(shape.parse().unwrap(), DType::BF16).unwrap();
        let mut tensors = assumed_tensors(&problem);
        tensors.lse = Some(DeviceLse::packed(0x5000, &problem));
        (problem, tensors)
    }

    #[test]
    fn lists_and_scales_lie_elsewhere_too() {
        let (problem, tensors) = served();
        let moved = Moved::new(&problem, &tensors).unwrap();
        let mut elsewhere = tensors;
        let mut next = 0x10_0000;
        let mut place = |address: &mut u64| {
            next += 0x104;
            *address = next;
        };
        let side = &mut elsewhere.side;
        place(&mut side.queries.as_mut().unwrap().cu_seqlens);
        place(&mut side.indices.as_mut().unwrap().address);
        place(&mut side.pages.as_mut().unwrap().table);
        for word in [&mut side.seqused_kv, &mut side.seqused_q, &mut side.leftpad_kv] {
            place(word.as_mut().unwrap());
        }
        place(side.alibi_slopes.as_mut().unwrap());
        place(side.sinks.as_mut().unwrap());
        let scales = elsewhere.scales.as_mut().unwrap();
        place(&mut scales.k);
        place(&mut scales.v);
        elsewhere.q.address = 0x9000;
        assert_eq!(moved.params(&elsewhere), Some(elsewhere.params(&problem)));
        assert_ne!(moved.params(&tensors), moved.params(&elsewhere));
        let packed: Problem = Problem::new("b3h2s9d16:varlen".parse().unwrap(), DType::BF16).unwrap();
        let tensors = assumed_tensors(&packed);
        let mut elsewhere = tensors;
        elsewhere.side.keys.as_mut().unwrap().cu_seqlens = 0x20_0004;
        let moved = Moved::new(&packed, &tensors).unwrap();
        assert_eq!(moved.params(&elsewhere), Some(elsewhere.params(&packed)));
    }

    #[test]
    fn a_served_call_that_differs_in_more_is_looked_at_anew() {
        let (problem, tensors) = served();
        let moved = Moved::new(&problem, &tensors).unwrap();
        type Change = fn(&mut DeviceTensors);
        let changes: [Change; 18] = [
            |t| t.side.queries.as_mut().unwrap().tokens += 1,
            |t| t.side.queries.as_mut().unwrap().cu_seqlens = 0,
            |t| t.side.queries = None,
            |t| t.side.keys = t.side.queries,
            |t| t.side.seqused_kv = None,
            |t| t.side.seqused_kv = Some(2),
            |t| t.side.seqused_q = Some(0),
            |t| t.side.leftpad_kv = None,
            |t| t.side.indices.as_mut().unwrap().rows += 1,
            |t| t.side.indices = None,
            |t| t.side.pages.as_mut().unwrap().row_stride += 1,
            |t| t.side.pages.as_mut().unwrap().pages += 1,
            |t| t.side.alibi_slopes = Some(6),
            |t| t.side.sinks = None,
            |t| t.side.blocks = Some(64),
            |t| t.scales = None,
            |t| t.scales.as_mut().unwrap().k = 0,
            |t| t.scales.as_mut().unwrap().v += 2,
        ];
        for change in changes {
            let mut other = tensors;
            change(&mut other);
            assert_eq!(moved.params(&other), None, "{other:?}");
        }
    }
}
