//! CUDA source to PTX, with NVRTC: the same compiler that makes kernels at run time, found where it is installed.

use crate::error::{Error, Result};
use crate::module::Module;
use crate::nvrtc::{Nvrtc, Outcome, Output, Source};
use std::path::PathBuf;

/// NVRTC options by default.
pub const DEFAULT_ARCH: &str = "sm_80";
/// The architectures that a source can be compiled for.
const ARCHS: [&str; 7] = ["75", "80", "86", "87", "89", "90", "90a"];

/// NVRTC has no C library. What device code may use of one is built in; the rest is in libcu++, which comes with the compiler.
const HEADERS: [(&[&str], &str); 5] = [
    (&["stdio.h", "cstdio", "assert.h", "cassert", "stdlib.h", "cstdlib", "string.h", "cstring"], ""),
    (&["stdint.h", "cstdint"], "#include <cuda/std/cstdint>\n"),
    (&["stddef.h", "cstddef"], "#include <cuda/std/cstddef>\n"),
    (
        &["limits.h", "climits", "float.h", "cfloat"],
        "#include <cuda/std/climits>\n#include <cuda/std/cfloat>\n",
    ),
    (
        &["math.h", "cmath"],
        "#pragma once\n#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)\n\
         #define M_PI 3.14159265358979323846\n",
    ),
];

/// How to compile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileOptions {
    /// `sm_80`, `compute_90a`, or the number alone.
    pub arch: String,
    /// `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Folders with headers.
    pub include: Vec<PathBuf>,
    /// Options of NVRTC as they are.
    pub more: Vec<String>,
    /// Templates to instantiate, such as `scale<float>`.
    pub instances: Vec<String>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions {
            arch: DEFAULT_ARCH.to_owned(),
            defines: Vec::new(),
            include: Vec::new(),
            more: Vec::new(),
            instances: Vec::new(),
        }
    }
}

impl CompileOptions {
    /// Instantiates the templates among the names of entries: a name with arguments, `scale<float>`, without parameters.
    pub fn with_instances<'a>(mut self, entries: impl IntoIterator<Item = &'a str>) -> Self {
        // `k<double, 10>`; not `void k<float>(float*)`, which names what must be there already.
        let is_instance = |name: &&str| {
            name.ends_with('>')
                && name.split('<').next().is_some_and(|head| !head.contains([' ', '(']))
                && name.contains('<')
        };
        self.instances.extend(entries.into_iter().filter(is_instance).map(str::to_owned));
        self
    }

    fn target(&self) -> Result<String> {
        let number = ["sm_", "compute_"].into_iter().find_map(|prefix| self.arch.strip_prefix(prefix));
        let number = number.unwrap_or(&self.arch);
        match ARCHS.contains(&number) {
            true => Ok(format!("compute_{number}")),
            false => {
                let known = ARCHS.map(|arch| format!("sm_{arch}")).join(", ");
                Err(Error::Compiler(format!("no architecture `{}`; there are {known}", self.arch)))
            }
        }
    }

    fn options(&self, target: &str) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={target}"), "-lineinfo".to_owned()];
        // nvcc has 128-bit integers, and INFINITY and its like, without being asked.
        options.extend(["-device-int128".to_owned(), "--pre-include=math.h".to_owned()]);
        if !self.more.iter().any(|option| option.starts_with("-std") || option.starts_with("--std")) {
            options.push("-std=c++17".to_owned());
        }
        options.extend(self.defines.iter().map(|define| format!("-D{define}")));
        options.extend(self.include.iter().map(|folder| format!("-I{}", folder.display())));
        options.extend(self.more.iter().cloned());
        options
    }
}

/// The module in a text: PTX, or CUDA C++ that is compiled first. `file_name` is what messages and findings call it.
pub fn load(file_name: &str, text: &str, options: &CompileOptions) -> Result<Module> {
    let is_ptx = file_name.to_ascii_lowercase().ends_with(".ptx")
        // All PTX starts with this directive.
        || text.lines().any(|line| line.trim_start().starts_with(".version"));
    if is_ptx { Module::parse(text) } else { Module::parse(&compile(file_name, text, options)?) }
}

/// Compiles CUDA C++ to PTX with line information. `file_name` is what messages and findings call it.
pub fn compile(file_name: &str, text: &str, options: &CompileOptions) -> Result<String> {
    let target = options.target()?;
    let nvrtc = Nvrtc::shared().map_err(|error| Error::Compiler(error.to_string()))?;
    let source = Source {
        label: file_name,
        file_name,
        text,
        headers: HEADERS.iter().flat_map(|(names, text)| names.iter().map(|name| (*name, *text))).collect(),
        options: options.options(&target),
        instances: options.instances.iter().map(String::as_str).collect(),
    };
    match nvrtc.compile(&source, Output::Ptx).map_err(|error| Error::Compiler(error.to_string()))? {
        Outcome::Compiled { code, .. } => Ok(String::from_utf8_lossy(&code).into_owned()),
        Outcome::Rejected { log } => {
            let hint = hint(&log, &target, options);
            let log = log.trim_end().to_owned();
            Err(Error::Rejected { file: file_name.to_owned(), target, log, hint })
        }
    }
}

/// What helps against the refusals that a newcomer meets first.
fn hint(log: &str, target: &str, options: &CompileOptions) -> String {
    if log.contains("nv_mangled_name") {
        let names = options.instances.join("` or `");
        format!(
            "is `{names}` a template of this file, and are these its arguments? a kernel that is none has no <>"
        )
    } else if log.contains("device-side kernel launch") {
        "a kernel that launches another is not simulated: launch them one after the other, `ptxsan run FILE … --then --entry NAME …`"
            .to_owned()
    } else if log.contains("in JIT mode") || log.contains("cannot open source file") {
        "only device code is compiled: put host code and its headers between `#ifndef __CUDACC_RTC__` and `#endif` (--nvrtc=-default-device \
         takes functions and variables without __device__ for device code), name folders of headers with -I, or give the PTX of \
         `nvcc -ptx -lineinfo -arch=compute_80 FILE.cu` instead"
            .to_owned()
    } else {
        format!(
            "compiled for {target}; --arch chooses another architecture, sm_90a for Hopper's instructions"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_three_spellings_and_others_are_named() {
        let target = |arch: &str| CompileOptions { arch: arch.to_owned(), ..Default::default() }.target();
        for arch in ["sm_90a", "compute_90a", "90a"] {
            assert_eq!(target(arch).unwrap(), "compute_90a");
        }
        for arch in ["", "sm_", "sm_100", "hopper", "9.0"] {
            let error = target(arch).unwrap_err().to_string();
            assert!(error.contains(&format!("`{arch}`")) && error.contains("sm_80"), "{error}");
        }
    }

    #[test]
    fn a_standard_of_ones_own_replaces_the_default() {
        let standards = |more: &[&str]| {
            let more = more.iter().map(|option| (*option).to_owned()).collect();
            let options = CompileOptions { more, ..Default::default() }.options("compute_80");
            options.into_iter().filter(|option| option.contains("std")).collect::<Vec<_>>()
        };
        assert_eq!(standards(&[]), ["-std=c++17"]);
        assert_eq!(standards(&["-std=c++20"]), ["-std=c++20"]);
    }
}
