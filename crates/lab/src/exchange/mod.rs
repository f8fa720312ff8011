//! Problems and kernels as other tools take them: tasks of KernelBench, problems of GPU MODE's kernelbot, evaluators of OpenEvolve.
//! The files call evosdpa; nothing of those tools is in them. [`Handed`] is what comes back.

mod handed;

use evosdpa_core::{DType, Mask, Problem};
use evosdpa_kernels::Kernel;

pub use handed::{Handed, Submission, task_beside};

use crate::Error;

/// A tool that files are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// <https://github.com/ScalingIntelligence/KernelBench>: `Model` and `ModelNew`.
    KernelBench,
    /// <https://github.com/gpu-mode/reference-kernels>: a problem's folder with a submission.
    GpuMode,
    /// <https://github.com/codelion/openevolve>: a program, its evaluator and a configuration.
    OpenEvolve,
}

impl Tool {
    /// Every tool.
    pub const ALL: [Self; 3] = [Self::KernelBench, Self::GpuMode, Self::OpenEvolve];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::KernelBench => "kernelbench",
            Self::GpuMode => "gpumode",
            Self::OpenEvolve => "openevolve",
        }
    }
}

impl std::str::FromStr for Tool {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|tool| tool.name() == text).ok_or_else(|| {
            Error::Problem(evosdpa_core::Error::UnknownName {
                kind: "tool",
                name: text.to_owned(),
                nearest: evosdpa_core::error::nearest(text, Self::ALL.iter().map(|tool| tool.name())),
                allowed: Self::ALL.map(Self::name).join(", "),
            })
        })
    }
}

/// The files of a problem, by their names from the folder they go into. `kernel` is what OpenEvolve evolves.
pub fn files(tool: Tool, problem: &Problem, kernel: Option<&Kernel>) -> Result<Vec<(String, String)>, Error> {
    let torch_dtype = match problem.dtype() {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        other => return Err(refused(tool, problem, &format!("{other} codes"))),
    };
    if let Some(feature) = problem.features().iter().next() {
        return Err(refused(tool, problem, &feature.to_string()));
    }
    let sizes = problem.sizes();
    let is_causal = match problem.mask() {
        Mask::Full => false,
        Mask::Causal(_) if sizes.seq_q == sizes.seq_kv => true,
        _ => return Err(refused(tool, problem, "this mask")),
    };
    let number = |n: usize| n.to_string();
    let words: Vec<(&str, String)> = vec![
        ("@PROBLEM@", problem.to_string()),
        ("@BATCH@", number(sizes.batch)),
        ("@HEADS@", number(sizes.heads_q)),
        ("@HEADS_KV@", number(sizes.heads_kv)),
        ("@GROUP@", number(problem.group())),
        ("@QUERIES@", number(sizes.seq_q)),
        ("@KEYS@", number(sizes.seq_kv)),
        ("@DIM@", number(sizes.dim_qk)),
        ("@VALUE_DIM@", number(sizes.dim_v)),
        ("@TORCH_DTYPE@", torch_dtype.to_owned()),
        ("@TOLERANCE@", if problem.dtype() == DType::F32 { "1e-4" } else { "1e-2" }.to_owned()),
        ("@IS_CAUSAL@", if is_causal { "True" } else { "False" }.to_owned()),
        ("@MASK_WORDS@", if is_causal { ", causal" } else { "" }.to_owned()),
        ("@LEADERBOARD@", "attention".to_owned()),
    ];
    let file = |name: &str, template: &str| (name.to_owned(), filled(template, &words));
    Ok(match tool {
        Tool::KernelBench => vec![
            file("1_attention.py", include_str!("kernelbench_task.py")),
            file("solution.py", include_str!("kernelbench_solution.py")),
        ],
        Tool::GpuMode => vec![
            file("task.yml", include_str!("gpumode_task.yml")),
            file("task.py", include_str!("gpumode_task.py")),
            file("reference.py", include_str!("gpumode_reference.py")),
            file("submission.py", include_str!("gpumode_submission.py")),
        ],
        Tool::OpenEvolve => of_openevolve(problem, kernel, is_causal)?,
    })
}

fn of_openevolve(
    problem: &Problem,
    kernel: Option<&Kernel>,
    is_causal: bool,
) -> Result<Vec<(String, String)>, Error> {
    let Some(kernel) = kernel else {
        return Err(Error::Tune("name the kernel that OpenEvolve is to evolve with --kernel".to_owned()));
    };
    let sizes = problem.sizes();
    let mask = if is_causal { ":causal" } else { "" };
    let small = format!("b1h{}/1s48d{}{mask}", problem.group(), sizes.dim_qk);
    let own = kernel.files();
    let source = own.iter().find(|(_, text)| **text == *kernel.source).map_or("kernel.cu", |(name, _)| *name);
    let words = [
        ("@KERNEL@", kernel.name().to_owned()),
        ("@SHAPE@", problem.shape().to_string()),
        ("@SMALL_SHAPE@", small),
        ("@DTYPE@", problem.dtype().to_string()),
        ("@SOURCE@", source.to_owned()),
    ];
    let program = format!("// EVOLVE-BLOCK-START\n{}// EVOLVE-BLOCK-END\n", kernel.source);
    let mut files = vec![
        ("initial_program.cu".to_owned(), program),
        ("evaluator.py".to_owned(), filled(include_str!("openevolve_evaluator.py"), &words)),
        ("config.yaml".to_owned(), filled(include_str!("openevolve_config.yaml"), &words)),
    ];
    files.extend(own.iter().map(|(name, text)| (format!("kernel/{name}"), (*text).to_owned())));
    Ok(files)
}

fn filled(template: &str, words: &[(&str, String)]) -> String {
    words.iter().fold(template.to_owned(), |text, (name, value)| text.replace(name, value))
}

fn refused(tool: Tool, problem: &Problem, what: &str) -> Error {
    Error::Tune(format!(
        "{problem} cannot be a task of {}: it is made of torch's scaled_dot_product_attention, which does not have {what}",
        tool.name()
    ))
}
