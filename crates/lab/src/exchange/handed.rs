//! Submissions from other tools: answers to exported tasks, to be evaluated here.

use std::path::{Path, PathBuf};

use evosdpa_core::{DType, Problem, Shape, file};

use super::Tool;
use crate::Error;

/// A Python file with a function that answers a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// The file.
    pub path: PathBuf,
    /// What is called in it: `ModelNew` or `custom_kernel`.
    pub entry: &'static str,
}

/// An answer to a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handed {
    /// A CUDA source that keeps a kernel's contract.
    Source(String),
    /// A function in Python, which launches what it likes.
    Python(Submission),
}

/// The longest file that is taken.
const BYTES_MAX: u64 = 1 << 20;

impl Handed {
    /// Reads an answer. What cannot be evaluated is refused by name.
    pub fn read(tool: Tool, path: &Path) -> Result<Self, Error> {
        let refused = |why: String| Error::Handed { tool: tool.name(), path: path.to_owned(), why };
        let text = file::read_text(path, BYTES_MAX).map_err(|error| refused(error.to_string()))?;
        let is = |ending: &str| path.extension().is_some_and(|known| known.eq_ignore_ascii_case(ending));
        let defines = |words: &str| text.lines().any(|line| line.trim_start().starts_with(words));
        if tool == Tool::OpenEvolve {
            if is("py") || !text.contains("__global__") {
                let why = "it has no `__global__` function: a program of these tasks is the CUDA source of a kernel";
                return Err(refused(why.to_owned()));
            }
            return Ok(Self::Source(text));
        }
        if !is("py") {
            let why = "only Python files are taken: a source in CUDA or C++ does not say how it is launched. For one that keeps the \
                       contract of a kernel of this lab, see `import openevolve` and --kernel-path";
            return Err(refused(why.to_owned()));
        }
        let (entry, definitions) = match tool {
            Tool::KernelBench => ("ModelNew", ["class ModelNew(", "class ModelNew:"]),
            _ => ("custom_kernel", ["def custom_kernel(", "custom_kernel ="]),
        };
        if path.to_str().is_none() {
            return Err(refused("its name is no UTF-8 text, which Python is asked in: rename it".to_owned()));
        }
        if definitions.iter().any(|words| defines(words)) {
            return Ok(Self::Python(Submission { path: path.to_owned(), entry }));
        }
        let is_task = defines("class Model(") || defines("def ref_kernel(");
        let hint = if is_task { "; this is the task, not an answer to it" } else { "" };
        Err(refused(format!("it does not define `{entry}`{hint}")))
    }
}

/// The problem, and with OpenEvolve the kernel, of the task whose files lie beside an answer, where this lab has written them.
pub fn task_beside(tool: Tool, path: &Path) -> Option<(Problem, Option<String>)> {
    let name = match tool {
        Tool::KernelBench => "1_attention.py",
        Tool::GpuMode => "task.yml",
        Tool::OpenEvolve => "evaluator.py",
    };
    let text = file::read_text(&path.parent()?.join(name), BYTES_MAX).ok()?;
    if tool == Tool::OpenEvolve {
        let line = text.lines().find_map(|line| line.strip_prefix("KERNEL, SHAPE, DTYPE = "))?;
        let words: Vec<&str> = line.split(", ").map(|word| word.trim_matches('"')).collect();
        let [kernel, shape, dtype] = words.as_slice() else { return None };
        // The exported kernel has a name of its own, and another source for it would collide.
        let parent = kernel.strip_suffix("_evolved").unwrap_or(kernel);
        return Some((problem(shape, dtype)?, Some(parent.to_owned())));
    }
    // `"""b8h16s1024d64:causal bf16 as a task of …`, `# mission f16 as a problem of …`.
    let mut words = text.lines().next()?.trim_start_matches(['"', '#', ' ']).split_whitespace();
    Some((problem(words.next()?, words.next()?)?, None))
}

fn problem(shape: &str, dtype: &str) -> Option<Problem> {
    Problem::new(shape.parse::<Shape>().ok()?, dtype.parse::<DType>().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_from_what_cannot_be_one() {
        let folder = tempfile::tempdir().unwrap();
        let read = |tool: Tool, name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            Handed::read(tool, &path).map_err(|error| error.to_string())
        };
        for (tool, name, text) in [
            (Tool::KernelBench, "a.py", "import torch\nclass ModelNew(torch.nn.Module):\n    pass\n"),
            (Tool::GpuMode, "b.py", "def custom_kernel(data):\n    return data[0]\n"),
            (Tool::OpenEvolve, "c.cu", "extern \"C\" __global__ void k() {}\n"),
        ] {
            assert!(read(tool, name, text).is_ok(), "{name}");
        }
        for (tool, name, text, why) in [
            (Tool::KernelBench, "d.py", "class Model(torch.nn.Module):\n", "this is the task, not an answer"),
            (Tool::KernelBench, "e.cu", "__global__ void k() {}", "does not say how it is launched"),
            (Tool::GpuMode, "f.py", "x = 1\n", "it does not define `custom_kernel`"),
            (Tool::OpenEvolve, "g.py", "def f(): pass\n", "no `__global__` function"),
        ] {
            let said = read(tool, name, text).unwrap_err();
            assert!(said.contains(why) && said.contains(name), "{said}");
        }
        let missing = Handed::read(Tool::GpuMode, &folder.path().join("none.py")).unwrap_err().to_string();
        assert!(missing.contains("none.py"), "{missing}");
        let long = "#".repeat(BYTES_MAX as usize + 1);
        assert!(read(Tool::GpuMode, "h.py", &long).unwrap_err().contains("larger than 1 MiB"));
    }

    #[test]
    fn the_task_is_found_beside_its_answer() {
        let kernels = evosdpa_kernels::Registry::embedded().unwrap();
        let asked = problem("b2h8/2s64d32:causal", "f16").unwrap();
        for tool in Tool::ALL {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in super::super::files(tool, &asked, kernels.kernel("sdpa_v1").ok()).unwrap() {
                let path = folder.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            let (found, kernel) = task_beside(tool, &folder.path().join("answer")).unwrap();
            assert_eq!(found.to_string(), asked.to_string(), "{tool:?}");
            assert_eq!(kernel.as_deref(), (tool == Tool::OpenEvolve).then_some("sdpa_v1"));
        }
        assert_eq!(task_beside(Tool::GpuMode, Path::new("/nowhere/x.py")), None);
    }
}
