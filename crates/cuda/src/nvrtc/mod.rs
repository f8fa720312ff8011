//! NVRTC, the CUDA compiler library: where it is, how to get it, and its C interface.
//!
//! This folder stands alone and is part of two crates, `evosdpa-cuda` and `ptxsan` (there by a link): each can be published without the
//! other, and there is one way to find and call the compiler.
//!
//! The functions are looked up in the very library that [`Toolkit`] found, so that no other copy on the search path can
//! answer, and a missing one is an error instead of a panic.
//! See <https://docs.nvidia.com/cuda/nvrtc/index.html>.

mod error;
pub mod toolchain;
pub mod toolkit;

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::Path,
    ptr,
    sync::{Mutex, OnceLock},
};

use libloading::{Library, Symbol};

pub use error::{Error, Result};
use toolkit::Toolkit;

type Program = *mut c_void;
type Code = c_int;

const SUCCESS: Code = 0;
const COMPILATION_ERROR: Code = 6;

/// The compiler library, open.
pub struct Nvrtc {
    toolkit: Toolkit,
    library: Library,
    /// Kept open: NVRTC opens it by its bare name, which only works while it is loaded.
    _builtins: Library,
}

/// What to compile, in NVRTC's terms.
pub struct Source<'a> {
    /// What errors call it.
    pub label: &'a str,
    /// The file's name, as it appears in messages and line information.
    pub file_name: &'a str,
    /// CUDA C++.
    pub text: &'a str,
    /// Names and texts of headers that are not read from disk.
    pub headers: Vec<(&'a str, &'a str)>,
    /// Options, beside the toolkit's own include folders.
    pub options: Vec<String>,
    /// Templates that are to be instantiated, such as `scale<float>`.
    pub instances: Vec<&'a str>,
}

/// What NVRTC made of it.
pub enum Outcome {
    /// PTX text or a cubin, and everything the compiler said.
    Compiled {
        /// What was asked for.
        code: Vec<u8>,
        /// Warnings, and the report of ptxas.
        log: String,
    },
    /// The source does not compile.
    Rejected {
        /// Why.
        log: String,
    },
}

/// Which output to fetch.
#[derive(Clone, Copy)]
pub enum Output {
    /// PTX text.
    Ptx,
    /// Machine code.
    Cubin,
}

impl Nvrtc {
    /// The toolkit's compiler, opened once per process.
    pub fn shared() -> Result<&'static Self> {
        static OPEN: OnceLock<Nvrtc> = OnceLock::new();
        static OPENING: Mutex<()> = Mutex::new(());
        if let Some(nvrtc) = OPEN.get() {
            return Ok(nvrtc);
        }
        // A panic elsewhere while opening leaves nothing half-done: try again.
        let _opening = OPENING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(nvrtc) = OPEN.get() {
            return Ok(nvrtc);
        }
        let nvrtc = Self::open(Toolkit::find()?)?;
        Ok(OPEN.get_or_init(|| nvrtc))
    }

    /// Opens the compiler of a toolkit.
    pub fn open(toolkit: &Toolkit) -> Result<Self> {
        let builtins = open_library(&toolkit.builtins)?;
        let library = open_library(&toolkit.nvrtc)?;
        let nvrtc = Self { toolkit: toolkit.clone(), library, _builtins: builtins };
        nvrtc.version().map_err(|problem| Error::Broken { path: toolkit.nvrtc.clone(), problem })?;
        Ok(nvrtc)
    }

    /// Major and minor version.
    pub fn version(&self) -> Result<(i32, i32), String> {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code;
        let version: Symbol<'_, Version> = self.function("nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: nvrtcVersion writes two integers.
        let code = unsafe { version(&mut major, &mut minor) };
        if code == SUCCESS { Ok((major, minor)) } else { Err(self.error_text(code)) }
    }

    /// Compiles; a source that NVRTC rejects is an [`Outcome`], not an error.
    pub fn compile(&self, source: &Source<'_>, output: Output) -> Result<Outcome> {
        let failed = |operation: &'static str| {
            move |problem: String| Error::Call { operation, label: source.label.to_owned(), problem }
        };
        let program = self.create(source).map_err(failed("nvrtcCreateProgram"))?;
        for name in &source.instances {
            self.instantiate(&program, name).map_err(failed("nvrtcAddNameExpression"))?;
        }
        let include = self.toolkit.include.iter().map(|folder| format!("-I{}", folder.display()));
        // From 13.0 on NVRTC has a cache of its own, out of which code comes without the report of ptxas.
        let no_cache = matches!(self.version(), Ok((13.., _))).then(|| "--no-cache".to_owned());
        let options: Vec<String> = source.options.iter().cloned().chain(include).chain(no_cache).collect();
        let options = c_strings(options.iter().map(String::as_str)).map_err(failed("nvrtcCompileProgram"))?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code;
        let compile: Symbol<'_, Compile> =
            self.function("nvrtcCompileProgram").map_err(failed("nvrtcCompileProgram"))?;
        // SAFETY: the program is alive, and the pointers are as many strings as the count says.
        let code = unsafe { compile(program.raw, pointers.len() as c_int, pointers.as_ptr()) };

        let log = self
            .fetch(&program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            .map_err(failed("nvrtcGetProgramLog"))?;
        let log = text_of(&log);
        match code {
            SUCCESS => {}
            COMPILATION_ERROR => return Ok(Outcome::Rejected { log }),
            code => {
                let problem = format!("{} {log}", self.error_text(code));
                return Err(failed("nvrtcCompileProgram")(problem));
            }
        }
        let code = match output {
            Output::Ptx => {
                let ptx =
                    self.fetch(&program, "nvrtcGetPTXSize", "nvrtcGetPTX").map_err(failed("nvrtcGetPTX"))?;
                text_of(&ptx).into_bytes()
            }
            Output::Cubin => {
                self.fetch(&program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN").map_err(failed("nvrtcGetCUBIN"))?
            }
        };
        Ok(Outcome::Compiled { code, log })
    }

    fn create(&self, source: &Source<'_>) -> Result<OwnedProgram<'_>, String> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> Code;
        let create: Symbol<'_, Create> = self.function("nvrtcCreateProgram")?;
        let text = c_string(source.text)?;
        let name = c_string(source.file_name)?;
        let names = c_strings(source.headers.iter().map(|(name, _)| *name))?;
        let contents = c_strings(source.headers.iter().map(|(_, text)| *text))?;
        let name_pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let content_pointers: Vec<*const c_char> = contents.iter().map(|text| text.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: every pointer is to a live NUL-terminated string, NVRTC copies them, and both header arrays have as
        // many entries as the count says.
        let code = unsafe {
            create(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                content_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        if code == SUCCESS { Ok(OwnedProgram { nvrtc: self, raw }) } else { Err(self.error_text(code)) }
    }

    fn instantiate(&self, program: &OwnedProgram<'_>, name: &str) -> Result<(), String> {
        type AddName = unsafe extern "C" fn(Program, *const c_char) -> Code;
        let add: Symbol<'_, AddName> = self.function("nvrtcAddNameExpression")?;
        let name = c_string(name)?;
        // SAFETY: the program is alive and not compiled yet; the name is a live NUL-terminated string, which NVRTC copies.
        let code = unsafe { add(program.raw, name.as_ptr()) };
        if code == SUCCESS { Ok(()) } else { Err(self.error_text(code)) }
    }

    fn fetch(&self, program: &OwnedProgram<'_>, size: &str, content: &str) -> Result<Vec<u8>, String> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> Code;
        type Content = unsafe extern "C" fn(Program, *mut c_char) -> Code;
        let size_of: Symbol<'_, Size> = self.function(size)?;
        let content_of: Symbol<'_, Content> = self.function(content)?;
        let mut bytes = 0;
        // SAFETY: the program is alive; the function writes one size.
        let code = unsafe { size_of(program.raw, &mut bytes) };
        if code != SUCCESS {
            return Err(self.error_text(code));
        }
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the program is alive, and the buffer has the size NVRTC just asked for.
        let code = unsafe { content_of(program.raw, buffer.as_mut_ptr().cast()) };
        if code == SUCCESS { Ok(buffer) } else { Err(self.error_text(code)) }
    }

    fn function<T>(&self, name: &str) -> Result<Symbol<'_, T>, String> {
        // SAFETY: every caller gives the type that NVRTC documents for the name.
        unsafe { self.library.get(name.as_bytes()) }.map_err(|error| format!("{name} is missing: {error}"))
    }

    fn error_text(&self, code: Code) -> String {
        type ErrorString = unsafe extern "C" fn(Code) -> *const c_char;
        let Ok(describe) = self.function::<ErrorString>("nvrtcGetErrorString") else {
            return format!("code {code}");
        };
        // SAFETY: the function takes any code and returns a static string.
        let text = unsafe { CStr::from_ptr(describe(code)) };
        text.to_string_lossy().into_owned()
    }
}

struct OwnedProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut Program) -> Code;
        if let Ok(destroy) = self.nvrtc.function::<Destroy>("nvrtcDestroyProgram") {
            // SAFETY: the program is alive and not used again.
            unsafe { destroy(&mut self.raw) };
        }
    }
}

fn open_library(path: &Path) -> Result<Library> {
    // SAFETY: this is NVIDIA's compiler library, whose initialisers are made for any process.
    unsafe { Library::new(path) }
        .map_err(|error| Error::Broken { path: path.to_owned(), problem: error.to_string() })
}

/// The text before the terminating NUL.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "the source, a name or an option contains a NUL byte".to_owned())
}

fn c_strings<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>, String> {
    texts.map(c_string).collect()
}
