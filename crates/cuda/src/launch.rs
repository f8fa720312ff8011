//! Launching: everything is checked once, so that a launch itself is one driver call.

use std::{ffi::c_void, mem, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};
use evosdpa_kernels::{LaunchGeometry, SdpaParams};

use crate::{Counters, Entered, Error, Function, RawStream, Result, Stream, TensorMap, driver::check};

/// The first architecture that can start a kernel before the one ahead of it has ended.
const PROGRAMMATIC_MAJOR: u32 = 9;

/// A kernel with its launch geometry, checked against the device and ready to go.
///
/// A launch with other pointers costs one driver call, two where it needs a work counter, three where it needs a workspace. It
/// neither allocates nor waits, but for the first one on a stream that needs a workspace.
#[derive(Clone, Debug)]
pub struct PreparedLaunch {
    function: Function,
    geometry: LaunchGeometry,
    /// Only where the geometry asks for a counter or a workspace.
    counters: Option<Arc<Counters>>,
}

impl PreparedLaunch {
    /// The most tensor maps a kernel may take.
    pub const TENSOR_MAPS_MAX: usize = 8;

    /// Checks the geometry against the kernel and the device, and raises the kernel's shared-memory limit. Work counters,
    /// where it asks for one, are its own.
    pub fn new(function: &Function, geometry: LaunchGeometry) -> Result<Self> {
        Self::sharing(function, geometry, &Arc::new(Counters::of(function.context())))
    }

    /// As [`PreparedLaunch::new`], with work counters that other launches on the device use too.
    pub fn sharing(function: &Function, geometry: LaunchGeometry, counters: &Arc<Counters>) -> Result<Self> {
        let shares = geometry.counter || geometry.workspace_bytes > 0;
        let counters = shares.then(|| Arc::clone(counters));
        let prepared = Self { function: function.clone(), geometry, counters };
        prepared.check_shared_memory()?;
        prepared.check_threads()?;
        prepared.raise_shared_memory_limit()?;
        prepared.prepare_cluster()?;
        prepared.prepare_counters()?;
        Ok(prepared)
    }

    /// The kernel.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// The geometry.
    pub fn geometry(&self) -> &LaunchGeometry {
        &self.geometry
    }

    /// What its work counters come from; `None` when it needs none.
    pub fn counters(&self) -> Option<&Counters> {
        self.counters.as_deref()
    }

    /// `sdpa_v2b[STAGES=2]: grid 8x8x1, block 256x1x1, 81920 bytes of dynamic shared memory`.
    pub fn describe(&self) -> String {
        format!("{}: {}", self.function.label(), describe_geometry(&self.geometry))
    }

    /// Launches with these parameters; the work counter among them is filled in here.
    ///
    /// # Safety
    /// Every address in the parameters and tensor maps must be device memory that is valid for what the kernel reads
    /// and writes until the launch has finished, and the kernel must take exactly these arguments.
    pub unsafe fn launch(&self, stream: &Stream, params: &SdpaParams, maps: &[TensorMap]) -> Result<()> {
        let entered = self.function.context().enter()?;
        // SAFETY: the stream is alive and of this context; the rest is this function's contract.
        unsafe { self.launch_on(&entered, stream.number(), params, maps) }
    }

    /// Launches on someone else's stream, with the context already current.
    ///
    /// # Safety
    /// As for [`PreparedLaunch::launch`], and the stream must be a live one of the device's primary context.
    pub unsafe fn launch_on(
        &self,
        entered: &Entered<'_>,
        stream: RawStream,
        params: &SdpaParams,
        maps: &[TensorMap],
    ) -> Result<()> {
        let (count, max) = (maps.len(), Self::TENSOR_MAPS_MAX);
        if count > max {
            return Err(self.refuse(format!("{count} tensor maps, at most {max}")));
        }
        if !entered.is_of(self.function.context()) {
            return Err(self.refuse("another device's context is current".to_owned()));
        }
        let (counter, workspace) = self.shared(stream)?;
        let params = SdpaParams { counter, workspace, ..*params };
        let mut arguments = [ptr::null_mut::<c_void>(); 1 + Self::TENSOR_MAPS_MAX];
        arguments[0] = ptr::from_ref(&params).cast_mut().cast();
        for (argument, map) in arguments[1..].iter_mut().zip(maps) {
            *argument = map.as_ptr().cast_mut().cast();
        }
        // SAFETY: the driver only reads through the pointers, during the call; the rest is this function's contract.
        unsafe { self.submit(stream.0 as sys::CUstream, &mut arguments[..1 + maps.len()]) }
    }

    /// The addresses of a work counter and of a workspace for the next launch on the stream; 0 where there is none.
    fn shared(&self, stream: RawStream) -> Result<(u64, u64)> {
        let Some(counters) = &self.counters else { return Ok((0, 0)) };
        let LaunchGeometry { counter, workspace_bytes, .. } = self.geometry;
        let counter = if counter { counters.next(stream)? } else { 0 };
        let workspace = if workspace_bytes > 0 { counters.workspace(stream, workspace_bytes)? } else { 0 };
        Ok((counter, workspace))
    }

    /// Launches a kernel that takes parameters of its own, and nothing else, with so many blocks instead of the geometry's.
    ///
    /// # Safety
    /// As for [`PreparedLaunch::launch_on`].
    pub unsafe fn launch_own<P: bytemuck::Pod>(
        &self,
        entered: &Entered<'_>,
        stream: RawStream,
        blocks: u32,
        params: &P,
    ) -> Result<()> {
        if !entered.is_of(self.function.context()) {
            return Err(self.refuse("another device's context is current".to_owned()));
        }
        let mut arguments = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let mut attributes = self.attributes();
        let config = self.config(stream.0 as sys::CUstream, &mut attributes);
        let config = sys::CUlaunchConfig { gridDimX: blocks, ..config };
        // SAFETY: function, attributes and parameters are alive; stream and what the parameters name are the caller's promise.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, self.function.raw(), arguments.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernelEx", code, || self.describe())
    }

    /// Launches with arbitrary arguments, each a pointer to a value that the driver copies.
    ///
    /// # Safety
    /// As for [`PreparedLaunch::launch`]; the arguments must be as many and of such sizes as the kernel takes.
    pub unsafe fn launch_arguments(&self, stream: &Stream, arguments: &mut [*mut c_void]) -> Result<()> {
        let _entered = self.function.context().enter()?;
        // SAFETY: the stream is alive and of this context; the arguments are the caller's promise.
        unsafe { self.submit(stream.raw(), arguments) }
    }

    /// # Safety
    /// The function's context must be current, the stream alive and of it, and the arguments what the kernel takes.
    unsafe fn submit(&self, stream: sys::CUstream, arguments: &mut [*mut c_void]) -> Result<()> {
        let mut attributes = self.attributes();
        let config = self.config(stream, &mut attributes);
        // SAFETY: function and attributes are alive; stream and arguments are the caller's promise.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, self.function.raw(), arguments.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernelEx", code, || self.describe())
    }

    /// What the launch needs beyond its sizes.
    fn attributes(&self) -> Attributes {
        let mut attributes = Attributes::new();
        let LaunchGeometry { cluster, programmatic, .. } = self.geometry;
        if cluster != [1; 3] {
            let value = attributes.add(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            value.clusterDim.x = cluster[0];
            value.clusterDim.y = cluster[1];
            value.clusterDim.z = cluster[2];
        }
        // Older devices run one kernel after the other anyway, which is always right.
        if programmatic && self.function.context().info().major >= PROGRAMMATIC_MAJOR {
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes.add(id).programmaticStreamSerializationAllowed = 1;
        }
        attributes
    }

    fn config(&self, stream: sys::CUstream, attributes: &mut Attributes) -> sys::CUlaunchConfig {
        let LaunchGeometry { grid, block, dynamic_smem_bytes, .. } = self.geometry;
        sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: dynamic_smem_bytes,
            hStream: stream,
            attrs: attributes.list.as_mut_ptr(),
            numAttrs: attributes.count as u32,
        }
    }

    fn check_shared_memory(&self) -> Result<()> {
        let static_bytes = u64::from(self.function.attributes()?.smem_static_bytes);
        let dynamic_bytes = u64::from(self.geometry.dynamic_smem_bytes);
        let limit_bytes = u64::from(self.function.context().info().smem_per_block_bytes);
        let wanted_bytes = static_bytes + dynamic_bytes;
        if wanted_bytes <= limit_bytes {
            return Ok(());
        }
        Err(Error::SharedMemory {
            kernel: self.function.label().to_owned(),
            launch: describe_geometry(&self.geometry),
            wanted_bytes,
            static_bytes,
            dynamic_bytes,
            limit_bytes,
        })
    }

    /// To all that the device allows: the limit belongs to the kernel, and another launch of it may need more.
    fn raise_shared_memory_limit(&self) -> Result<()> {
        let static_bytes = self.function.attributes()?.smem_static_bytes;
        let allowed = self.function.context().info().smem_per_block_bytes.saturating_sub(static_bytes);
        let allowed = i32::try_from(allowed).unwrap_or(i32::MAX);
        self.function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, allowed)
    }

    fn check_threads(&self) -> Result<()> {
        let max = self.function.attributes()?.max_threads_per_block;
        let threads = self.geometry.threads_per_block();
        if threads == 0 || self.geometry.grid.contains(&0) || self.geometry.cluster.contains(&0) {
            return Err(self.refuse("a size is 0".to_owned()));
        }
        if threads > max {
            return Err(self.refuse(format!("{threads} threads per block, the kernel allows {max}")));
        }
        Ok(())
    }

    fn prepare_cluster(&self) -> Result<()> {
        let LaunchGeometry { grid, cluster, .. } = self.geometry;
        if cluster == [1; 3] {
            return Ok(());
        }
        if grid.iter().zip(cluster).any(|(blocks, per_cluster)| !blocks.is_multiple_of(per_cluster)) {
            return Err(self.refuse("the grid is no multiple of the cluster".to_owned()));
        }
        // Eight blocks always work; more only where the kernel has asked for it.
        if cluster.iter().product::<u32>() > 8 {
            self.function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        let mut attributes = self.attributes();
        let config = self.config(ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: function, config and attributes are alive; the driver writes one integer.
        let code = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.function.raw(), &config) };
        check("cuOccupancyMaxActiveClusters", code, || self.describe())?;
        if clusters == 0 {
            return Err(self.refuse("no cluster of this size fits on the device".to_owned()));
        }
        Ok(())
    }

    /// Here and not in a launch, which must not allocate.
    fn prepare_counters(&self) -> Result<()> {
        let Some(counters) = &self.counters else { return Ok(()) };
        if !counters.is_of(self.function.context()) {
            return Err(self.refuse("its work counters are another device's".to_owned()));
        }
        if self.geometry.counter {
            counters.prepare()?;
        }
        match self.geometry.workspace_bytes {
            0 => Ok(()),
            bytes => counters.prepare_workspace(bytes),
        }
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Launch {
            kernel: self.function.label().to_owned(),
            launch: describe_geometry(&self.geometry),
            problem,
        }
    }
}

/// Launch attributes, on the stack: a launch does not allocate.
struct Attributes {
    list: [sys::CUlaunchAttribute; Self::MAX],
    count: usize,
}

impl Attributes {
    /// One for each kind of attribute that [`PreparedLaunch::attributes`] knows.
    const MAX: usize = 2;

    fn new() -> Self {
        // SAFETY: all-zero bytes are valid attributes: their parts are integers and a union of plain data.
        Self { list: unsafe { mem::zeroed() }, count: 0 }
    }

    /// The value of a new attribute, to be set.
    fn add(&mut self, id: sys::CUlaunchAttributeID) -> &mut sys::CUlaunchAttributeValue {
        let attribute = &mut self.list[self.count];
        attribute.id = id;
        self.count += 1;
        &mut attribute.value
    }
}

fn describe_geometry(geometry: &LaunchGeometry) -> String {
    let sizes = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
    let cluster = match geometry.cluster {
        [1, 1, 1] => String::new(),
        cluster => format!(", cluster {}", sizes(cluster)),
    };
    let programmatic = if geometry.programmatic { ", programmatic" } else { "" };
    let counter = if geometry.counter { ", work counter" } else { "" };
    let workspace = match geometry.workspace_bytes {
        0 => String::new(),
        bytes => format!(", workspace of {bytes} bytes"),
    };
    format!(
        "grid {}, block {}{cluster}{programmatic}{counter}{workspace}, {} bytes of dynamic shared memory",
        sizes(geometry.grid),
        sizes(geometry.block),
        geometry.dynamic_smem_bytes
    )
}
