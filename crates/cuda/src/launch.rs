//! Launching: everything is checked once, so that a launch itself is one driver call.

use std::{ffi::c_void, mem::MaybeUninit, ptr};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};
use evosdpa_kernels::{LaunchGeometry, SdpaParams};

use crate::{Error, Function, Result, Stream, TensorMap, driver::check};

/// The most tensor maps a kernel may take.
const TENSOR_MAPS_MAX: usize = 8;

/// A kernel with its launch geometry, checked against the device and ready to go.
///
/// A launch with other pointers costs one driver call: it neither allocates nor waits.
#[derive(Clone, Debug)]
pub struct PreparedLaunch {
    function: Function,
    geometry: LaunchGeometry,
}

impl PreparedLaunch {
    /// Checks the geometry against the kernel and the device, and raises the kernel's shared-memory limit.
    pub fn new(function: &Function, geometry: LaunchGeometry) -> Result<Self> {
        let prepared = Self { function: function.clone(), geometry };
        prepared.check_shared_memory()?;
        prepared.check_threads()?;
        prepared.raise_shared_memory_limit()?;
        prepared.prepare_cluster()?;
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

    /// `sdpa_v2b[STAGES=2]: grid 8x8x1, block 256x1x1, 81920 bytes of dynamic shared memory`.
    pub fn describe(&self) -> String {
        format!("{}: {}", self.function.label(), describe_geometry(&self.geometry))
    }

    /// Launches with these parameters.
    ///
    /// # Safety
    /// Every address in the parameters and tensor maps must be device memory that is valid for what the kernel reads
    /// and writes until the launch has finished, and the kernel must take exactly these arguments.
    pub unsafe fn launch(&self, stream: &Stream, params: &SdpaParams, maps: &[TensorMap]) -> Result<()> {
        if maps.len() > TENSOR_MAPS_MAX {
            return Err(self.refuse(format!("{} tensor maps, at most {TENSOR_MAPS_MAX}", maps.len())));
        }
        let mut arguments: [*mut c_void; 1 + TENSOR_MAPS_MAX] = [ptr::null_mut(); 1 + TENSOR_MAPS_MAX];
        arguments[0] = ptr::from_ref(params).cast_mut().cast();
        for (argument, map) in arguments[1..].iter_mut().zip(maps) {
            *argument = map.as_ptr().cast_mut().cast();
        }
        // SAFETY: the driver only reads through the pointers, during the call; the rest is this function's contract.
        unsafe { self.launch_arguments(stream, &mut arguments[..1 + maps.len()]) }
    }

    /// Launches with arbitrary arguments, each a pointer to a value that the driver copies.
    ///
    /// # Safety
    /// As for [`PreparedLaunch::launch`]; the arguments must be as many and of such sizes as the kernel takes.
    pub unsafe fn launch_arguments(&self, stream: &Stream, arguments: &mut [*mut c_void]) -> Result<()> {
        self.function.context().bind()?;
        let mut attribute = MaybeUninit::zeroed();
        let config = self.config(stream.raw(), &mut attribute);
        // SAFETY: function, stream and attribute are alive; the arguments are the caller's promise.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, self.function.raw(), arguments.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernelEx", code, || self.describe())
    }

    fn config(
        &self,
        stream: sys::CUstream,
        attribute: &mut MaybeUninit<sys::CUlaunchAttribute>,
    ) -> sys::CUlaunchConfig {
        let LaunchGeometry { grid, block, cluster, dynamic_smem_bytes } = self.geometry;
        let mut attribute_count = 0;
        if cluster != [1; 3] {
            // SAFETY: all-zero bytes are a valid attribute: its parts are integers and a union of plain data.
            let attribute = unsafe { attribute.assume_init_mut() };
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute.value.clusterDim.x = cluster[0];
            attribute.value.clusterDim.y = cluster[1];
            attribute.value.clusterDim.z = cluster[2];
            attribute_count = 1;
        }
        sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: dynamic_smem_bytes,
            hStream: stream,
            attrs: attribute.as_mut_ptr(),
            numAttrs: attribute_count,
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
        let mut attribute = MaybeUninit::zeroed();
        let config = self.config(ptr::null_mut(), &mut attribute);
        let mut clusters = 0;
        // SAFETY: function, config and attribute are alive; the driver writes one integer.
        let code = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.function.raw(), &config) };
        check("cuOccupancyMaxActiveClusters", code, || self.describe())?;
        if clusters == 0 {
            return Err(self.refuse("no cluster of this size fits on the device".to_owned()));
        }
        Ok(())
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Launch {
            kernel: self.function.label().to_owned(),
            launch: describe_geometry(&self.geometry),
            problem,
        }
    }
}

fn describe_geometry(geometry: &LaunchGeometry) -> String {
    let sizes = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
    let cluster = match geometry.cluster {
        [1, 1, 1] => String::new(),
        cluster => format!(", cluster {}", sizes(cluster)),
    };
    format!(
        "grid {}, block {}{cluster}, {} bytes of dynamic shared memory",
        sizes(geometry.grid),
        sizes(geometry.block),
        geometry.dynamic_smem_bytes
    )
}
