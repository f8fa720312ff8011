//! A GPU and its context.

use std::{
    ffi::{CStr, c_char},
    marker::PhantomData,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use evosdpa_kernels::{Arch, Target};

use crate::{
    DeviceBuffer, Error, Module, Result, Stream,
    driver::{check, plain},
    loader,
};

/// What a device can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number, counted from 0.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its place on the bus, such as `0000:3b:00.0`: the same for every process, whatever number it sees it under.
    pub pci_bus_id: String,
    /// Compute capability.
    pub major: u32,
    /// Compute capability.
    pub minor: u32,
    /// SMs.
    pub sm_count: u32,
    /// The most shared memory one block may have, after opting in.
    pub smem_per_block_bytes: u32,
    /// Shared memory of one SM.
    pub smem_per_sm_bytes: u32,
    /// Registers of one SM.
    pub registers_per_sm: u32,
    /// Threads of one SM.
    pub threads_per_sm: u32,
    /// L2.
    pub l2_bytes: u64,
    /// Device memory.
    pub memory_bytes: u64,
    /// Highest clock of the SMs.
    pub clock_khz: u32,
    /// What the memory's clock and width allow, 10⁹ bytes a second; 0 where the driver does not say.
    pub memory_gbps: u32,
    /// The CUDA version the driver supports, 1000·major + 10·minor.
    pub driver_cuda_version: i32,
}

/// A GPU, ready to use. Cheap to clone; everything made from it keeps its context alive.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) context: Arc<Context>,
}

/// The device's primary context, shared with other users of it in this process (PyTorch among them).
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    info: DeviceInfo,
    /// Set when a kernel hung or crashed: from then on the driver is not called again, because every call would hang too, or
    /// be told of the same crash.
    lost: AtomicBool,
}

// SAFETY: a CUDA context may be used from any thread; each use makes it current on its thread first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises what needs it.
unsafe impl Sync for Context {}

impl Device {
    /// How many devices there are.
    pub fn count() -> Result<usize> {
        Ok(loader::driver()?.device_count)
    }

    /// The device `cuda:N`.
    pub fn open(ordinal: usize) -> Result<Self> {
        let driver = loader::driver()?;
        let count = driver.device_count;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(Error::NoSuchDevice { ordinal, count })?;
        let mut device = 0;
        // SAFETY: the driver is initialised, and the number is one of its devices.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, number) }, plain)?;
        let info = read_info(device, ordinal, driver.cuda_version)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the device is valid; the context is released when `Context` is dropped.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
        check("cuDevicePrimaryCtxRetain", code, || format!("cuda:{ordinal}"))?;
        Ok(Self { context: Arc::new(Context { device, raw, info, lost: AtomicBool::new(false) }) })
    }

    /// What it can do.
    pub fn info(&self) -> &DeviceInfo {
        &self.context.info
    }

    /// What to compile for on this device.
    pub fn target(&self) -> Result<Target> {
        let info = self.info();
        let arch = Arch::of_device(info.major, info.minor).ok_or_else(|| Error::UnsupportedDevice {
            device: info.name.clone(),
            major: info.major,
            minor: info.minor,
        })?;
        Ok(Target { arch, sm_count: info.sm_count, smem_limit_bytes: info.smem_per_block_bytes })
    }

    /// Makes the device's context current on this thread until the result is dropped, which puts back the one before:
    /// a guest in someone else's thread leaves it as it was.
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.context.enter()
    }

    /// Device memory that nobody has, as the driver says.
    pub fn free_memory_bytes(&self) -> Result<u64> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the driver writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, plain)?;
        Ok(free as u64)
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(&self.context)
    }

    /// Someone else's stream, for the time it is valid; it is not destroyed.
    ///
    /// # Safety
    /// `raw` must be a stream of this device's primary context (0 is the default stream) and outlive the result.
    pub unsafe fn borrow_stream(&self, raw: u64) -> Stream {
        Stream::borrow(&self.context, raw as sys::CUstream)
    }

    /// Device memory, uninitialised.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::alloc(&self.context, bytes)
    }

    /// Device memory in which every 16-bit and 32-bit floating-point value is NaN.
    pub fn alloc_poisoned(&self, bytes: usize) -> Result<DeviceBuffer> {
        let buffer = self.alloc(bytes)?;
        let stream = Stream::borrow(&self.context, ptr::null_mut());
        buffer.fill(0xff, &stream)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Loads a cubin.
    pub fn load(&self, cubin: &[u8], label: &str) -> Result<Module> {
        Module::load(&self.context, cubin, label)
    }

    /// Waits for everything.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() }, plain)
    }
}

/// Proof that a device's context is current on this thread. Dropping it puts back the context there was before.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    /// What to put back; `None` when nothing had to be changed.
    before: Option<sys::CUcontext>,
    /// The context is current on one thread only, so the proof must stay there.
    _on_this_thread: PhantomData<*const ()>,
}

impl Entered<'_> {
    /// Whether the device is the one that a thing was made from.
    pub(crate) fn is_of(&self, context: &Context) -> bool {
        self.context.is_same_as(context)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread a moment ago; null is allowed and means none.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

impl Context {
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        if self.is_lost() {
            return Err(Error::DeviceLost);
        }
        let mut before = ptr::null_mut();
        // SAFETY: the driver is initialised; it writes one pointer.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut before) }, plain)?;
        let before = (before != self.raw).then_some(before);
        if before.is_some() {
            self.bind()?;
        }
        Ok(Entered { context: self, before, _on_this_thread: PhantomData })
    }

    /// Makes the context current on this thread, unless the device was given up.
    pub(crate) fn bind(&self) -> Result<()> {
        if self.is_lost() {
            return Err(Error::DeviceLost);
        }
        // SAFETY: the context is alive: `self` holds it.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) }, plain)
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        self.raw == other.raw
    }

    pub(crate) fn give_up(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// The device was given up, but what ran has ended after all.
    pub(crate) fn take_back(&self) {
        self.lost.store(false, Ordering::Release);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// For destructors: runs `release` with the context current, or leaks when the device was given up, because
    /// releasing anything would wait for the kernel that hangs.
    pub(crate) fn release(&self, release: impl FnOnce() -> sys::CUresult) {
        if self.bind().is_ok() {
            // A destructor has nobody to tell; the next call on the context reports the same error.
            let _ = release();
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_lost() {
            // SAFETY: retained once in `open`; nothing made from the context is alive, because all of it holds an `Arc`.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

fn read_info(device: sys::CUdevice, ordinal: usize, driver_cuda_version: i32) -> Result<DeviceInfo> {
    let attribute = |attribute: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check("cuDeviceGetAttribute", code, || format!("{attribute:?}"))?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut text: [c_char; 256] = [0; 256];
    // SAFETY: the buffer is as long as the length says, and stays NUL-terminated.
    let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32 - 1, device) };
    check("cuDeviceGetName", code, plain)?;
    // SAFETY: the last byte is 0 whatever the driver wrote.
    let name = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    // SAFETY: as for the name.
    let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32 - 1, device) };
    check("cuDeviceGetPCIBusId", code, plain)?;
    // SAFETY: as for the name.
    let pci_bus_id = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: the driver writes one size.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) }, plain)?;
    let memory_clock_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
    let memory_bus_bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)? / 8;
    // Two transfers in each cycle.
    let memory_gbps = (2 * u64::from(memory_clock_khz) * u64::from(memory_bus_bytes) / 1_000_000) as u32;
    Ok(DeviceInfo {
        ordinal,
        name,
        pci_bus_id,
        major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        smem_per_block_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        smem_per_sm_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        registers_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        threads_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        memory_bytes: memory_bytes as u64,
        clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        memory_gbps,
        driver_cuda_version,
    })
}
