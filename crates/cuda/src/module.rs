//! Loaded cubins and their kernels.

use std::{ffi::CString, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};

use crate::{
    Error, Result,
    device::Context,
    driver::{check, plain},
};

/// A loaded cubin.
#[derive(Clone, Debug)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

#[derive(Debug)]
struct ModuleInner {
    context: Arc<Context>,
    raw: sys::CUmodule,
    label: String,
}

// SAFETY: a module may be used from any thread.
unsafe impl Send for ModuleInner {}
// SAFETY: as above; the driver serialises what needs it.
unsafe impl Sync for ModuleInner {}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8], label: &str) -> Result<Self> {
        // The driver reads as far as the headers say: make sure that what they say is there.
        crate::cubin::CubinFacts::read(cubin)?;
        context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the image is a complete ELF file, which the driver copies.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) };
        check("cuModuleLoadData", code, || format!("{label} on {}", context.info().name))?;
        let inner = ModuleInner { context: Arc::clone(context), raw, label: label.to_owned() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The kernel with this entry point.
    pub fn function(&self, entry: &str) -> Result<Function> {
        let context = &self.inner.context;
        context.bind()?;
        let missing = |problem: String| Error::Report { label: self.inner.label.clone(), problem };
        let name =
            CString::new(entry).map_err(|_| missing("the entry point's name has a NUL byte".to_owned()))?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is alive, and the name is NUL-terminated.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, self.inner.raw, name.as_ptr()) };
        check("cuModuleGetFunction", code, || format!("entry point `{entry}` of {}", self.inner.label))?;
        Ok(Function { module: Arc::clone(&self.inner), raw, entry: entry.to_owned() })
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        // SAFETY: loaded by us and not used again.
        self.context.release(|| unsafe { sys::cuModuleUnload(self.raw) });
    }
}

/// A kernel of a loaded cubin; it keeps the cubin loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<ModuleInner>,
    raw: sys::CUfunction,
    entry: String,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above; nothing here changes it without the driver's own locking.
unsafe impl Sync for Function {}

/// What the driver says of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory.
    pub smem_static_bytes: u32,
    /// Local memory per thread.
    pub local_bytes: u32,
    /// Constant memory.
    pub constant_bytes: u32,
    /// The most threads a block may have.
    pub max_threads_per_block: u32,
    /// The architecture it was compiled for: 90 for sm_90.
    pub binary_version: u32,
}

impl Function {
    /// The entry point.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// The variant it belongs to.
    pub fn label(&self) -> &str {
        &self.module.label
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    pub(crate) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// What the driver says of it.
    pub fn attributes(&self) -> Result<FunctionAttributes> {
        self.context().bind()?;
        let read = |attribute: Attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: the function is alive; the driver writes one integer.
            let code = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, self.raw) };
            check("cuFuncGetAttribute", code, || self.label().to_owned())?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(FunctionAttributes {
            registers: read(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            smem_static_bytes: read(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local_bytes: read(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            constant_bytes: read(Attribute::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)?,
            max_threads_per_block: read(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            binary_version: read(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
        })
    }

    /// How many blocks the driver would run on one SM.
    pub fn blocks_per_sm(&self, threads_per_block: u32, dynamic_smem_bytes: u32) -> Result<u32> {
        self.context().bind()?;
        let mut blocks = 0;
        // SAFETY: the function is alive; the driver writes one integer.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.raw,
                threads_per_block as i32,
                dynamic_smem_bytes as usize,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code, plain)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    pub(crate) fn set_attribute(&self, attribute: Attribute, value: i32) -> Result<()> {
        self.context().bind()?;
        // SAFETY: the function is alive; the driver checks the value.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, value) };
        check("cuFuncSetAttribute", code, || format!("{attribute:?} = {value} for {}", self.label()))
    }
}
