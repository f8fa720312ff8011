//! Driver calls with their errors turned into ours. Only reachable through a [`crate::Device`], so behind the guard.

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::{Error, Result};

pub(crate) const SUCCESS: sys::CUresult = sys::CUresult::CUDA_SUCCESS;

/// Every driver function this crate calls; the guard looks for each, because a missing one would panic when called.
pub(crate) const USED_FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxResetPersistingL2Cache",
    "cuCtxSetCurrent",
    "cuCtxSetLimit",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveClusters",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuTensorMapEncodeTiled",
    "cuTensorMapReplaceAddress",
    "cuThreadExchangeStreamCaptureMode",
];

/// `Ok` for success, else our error with the driver's name for it.
pub(crate) fn check(
    operation: &'static str,
    code: sys::CUresult,
    context: impl FnOnce() -> String,
) -> Result<()> {
    if code == SUCCESS {
        return Ok(());
    }
    Err(Error::Driver { operation, name: error_name(code), code: code as u32, context: context() })
}

/// For calls that need no more explanation than their name.
pub(crate) fn plain() -> String {
    String::new()
}

/// The driver's name of an error: `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) fn error_name(code: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: only called behind the guard; the driver writes a pointer to a static string, or null.
    let found = unsafe { sys::cuGetErrorName(code, &mut text) } == SUCCESS && !text.is_null();
    if !found {
        return "unknown error".to_owned();
    }
    // SAFETY: on success the text is a static, NUL-terminated string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::USED_FUNCTIONS;

    /// A function that the guard does not look for could panic on an old driver.
    #[test]
    fn every_function_called_is_guarded() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut called = 0;
        let mut left: Vec<_> = fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path()).collect();
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for call in text.split("sys::cu").skip(1) {
                let name: String = call.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                // The library handle is no driver function, and the loader looks for its own four.
                if name.is_empty() || name == "lib" || path.ends_with("loader.rs") || name == "GetErrorName" {
                    continue;
                }
                called += 1;
                assert!(
                    USED_FUNCTIONS.contains(&format!("cu{name}").as_str()),
                    "cu{name} in {}",
                    path.display()
                );
            }
        }
        assert!(called >= USED_FUNCTIONS.len(), "{called} calls found");
    }
}
