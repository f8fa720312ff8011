//! A small elementwise kernel to run before every timed launch, as another kernel does in a model.
//!
//! It adds one to 65,536 numbers, without programmatic launch, as an elementwise operation between two layers does.

use std::ffi::c_void;

use evosdpa_kernels::LaunchGeometry;

use crate::{ArtifactKind, CompileRequest, Compiler, Device, DeviceBuffer, PreparedLaunch, Result, Stream};

const SOURCE: &str = r#"
extern "C" __global__ void add_one(float4* numbers) {
  float4 x = numbers[blockIdx.x * blockDim.x + threadIdx.x];
  x.x += 1.f; x.y += 1.f; x.z += 1.f; x.w += 1.f;
  numbers[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
"#;

const BLOCKS: u32 = 128;
const THREADS: u32 = 128;
const THREAD_BYTES: u32 = 16;

/// The kernel and the numbers it works on.
#[derive(Debug)]
pub struct ForeignKernel {
    add_one: PreparedLaunch,
    numbers: DeviceBuffer,
}

impl ForeignKernel {
    /// Compiles the kernel for the device.
    pub fn new(device: &Device) -> Result<Self> {
        let architecture = device.target()?.arch.name();
        let request = CompileRequest {
            label: "foreign kernel".to_owned(),
            file_name: "foreign.cu".to_owned(),
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            target: architecture.to_owned(),
            kind: ArtifactKind::Cubin,
            options: vec![format!("--gpu-architecture={architecture}"), "-std=c++17".to_owned()],
        };
        let compiled = Compiler::open()?.compile(&request)?;
        let function = device.load(&compiled.code, &request.label)?.function("add_one")?;
        let geometry = LaunchGeometry {
            grid: [BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            cluster: [1; 3],
            dynamic_smem_bytes: 0,
            programmatic: false,
            counter: false,
            workspace_bytes: 0,
        };
        let numbers = device.alloc((BLOCKS * THREADS * THREAD_BYTES) as usize)?;
        Ok(Self { add_one: PreparedLaunch::new(&function, geometry)?, numbers })
    }

    /// Puts it into the stream.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let mut address = self.numbers.address();
        let argument: *mut c_void = (&raw mut address).cast();
        // SAFETY: the kernel takes one pointer, to as many numbers as its threads touch, in a buffer that lives as long as
        // `self`; the driver copies the argument during the call.
        unsafe { self.add_one.launch_arguments(stream, &mut [argument]) }
    }
}
