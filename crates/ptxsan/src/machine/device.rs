//! A simulated device: memory, modules, launches.

use super::fold::Fold;
use super::launch::{Launch, Shape};
use super::world::{Setting, World};
use crate::decode::{Kernel, Special};
use crate::error::{Error, Result};
use crate::hazard::clock::Numbering;
use crate::memory::{Buffer, DeviceMemory};
use crate::module::{MAX_MODULES, Module};
use crate::names::demangled;
use crate::parse::ast::Space;
use crate::report::Outcome;
use rayon::prelude::*;

/// Local memory and registers of the blocks that run at once may not take more.
const MAX_BLOCK_BYTES: u64 = 2 << 30;
/// Blocks whose results are held before they are folded in.
const BATCH: u64 = 64;
/// What cooperative groups keep for a grid: a size and a counter.
const WORKSPACE_BYTES: usize = 64;

/// A module loaded on a [`Device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleId(usize);

/// A simulated device.
#[derive(Default)]
pub struct Device {
    memory: DeviceMemory,
    modules: Vec<Module>,
    /// Where the grids of cooperative launches synchronise.
    workspace: Option<Buffer>,
}

impl Device {
    /// A device with nothing on it.
    pub fn new() -> Self {
        Device::default()
    }

    /// Loads a module: its variables get memory and their initial values.
    pub fn load(&mut self, module: &Module) -> Result<ModuleId> {
        let slot = self.modules.len();
        if slot as u64 >= MAX_MODULES {
            return Err(Error::Memory(format!("a device holds at most {MAX_MODULES} modules")));
        }
        let module = module.at_slot(slot as u64)?;
        for (name, variable) in module.globals.iter() {
            let written = vec![1; variable.initial.len()];
            let is_read_only = variable.space == Space::Const;
            let name = demangled(name);
            self.memory.place(&name, variable.address, variable.initial.clone(), written, is_read_only)?;
        }
        self.modules.push(module);
        Ok(ModuleId(slot))
    }

    /// Allocates memory that counts as never written. The name appears in reports.
    pub fn allocate(&mut self, name: &str, bytes: usize) -> Result<Buffer> {
        self.memory.allocate(name, bytes)
    }

    /// Allocates memory and fills it.
    pub fn upload(&mut self, name: &str, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.allocate(name, bytes.len())?;
        self.write(buffer, 0, bytes)?;
        Ok(buffer)
    }

    /// Writes into a buffer.
    pub fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.memory.write(buffer, offset, bytes)
    }

    /// Reads a whole buffer.
    pub fn read(&mut self, buffer: Buffer) -> Result<Vec<u8>> {
        self.memory.read(buffer, 0, buffer.len())
    }

    /// Makes kernels' writes to a buffer a finding.
    pub fn set_read_only(&mut self, buffer: Buffer, is_read_only: bool) -> Result<()> {
        self.memory.set_read_only(buffer, is_read_only)
    }

    /// Makes bytes of a buffer that are still unwritten after a launch a finding.
    pub fn expect_written(&mut self, buffer: Buffer, is_output: bool) -> Result<()> {
        self.memory.set_output(buffer, is_output)
    }

    /// Frees a buffer; using it afterwards is an error here and a finding in a kernel.
    pub fn free(&mut self, buffer: Buffer) -> Result<()> {
        self.memory.free(buffer)
    }

    /// The memory of a module's variable.
    pub fn variable(&self, module: ModuleId, name: &str) -> Option<Buffer> {
        let variable = self.modules.get(module.0)?.globals.get(name)?;
        Some(Buffer { address: variable.address, bytes: variable.bytes as usize })
    }

    /// Runs a launch to its end and says what it did and what it did wrong.
    pub fn launch(&mut self, module: ModuleId, launch: &Launch) -> Result<Outcome> {
        let module = self.modules.get(module.0).cloned();
        let module = module.ok_or_else(|| Error::Memory("no such module on this device".into()))?;
        let kernel = module.kernel(&launch.entry)?.clone();
        let mut shape = check(&kernel, launch)?;
        if launch.cooperative {
            shape.workspace = self.fresh_workspace()?;
        }
        let params = pack_params(&kernel, launch)?;
        let numbering = Numbering::new(shape.threads(), kernel.has_agents);
        let blocks = shape.blocks();
        let options = &launch.options;
        let mut fold = Fold::new(&kernel, options.check_races && !kernel.communicates, numbering);
        let shape_at = |first_block: u64| Shape { first_block, ..shape.clone() };
        if kernel.communicates {
            let count = u32::try_from(blocks).ok().filter(|n| *n < u32::MAX >> numbering.shift);
            let count = count
                .ok_or_else(|| refuse(launch, "too many blocks for a kernel whose blocks talk".into()))?;
            let memory = &self.memory;
            let setting = Setting { module: &module, kernel: &kernel, options, params: &params, memory };
            let per_block = block_bytes(&kernel, &shape).max(1);
            let fitting = MAX_BLOCK_BYTES / per_block;
            if launch.cooperative && blocks > fitting {
                let reason = format!(
                    "{blocks} blocks of a cooperative launch; at most {fitting} run at the same time"
                );
                return Err(refuse(launch, reason));
            }
            let at_once = if launch.cooperative { count } else { options.resident_blocks.max(1) };
            let fitting = fitting.clamp(1, u64::from(at_once)) as u32;
            let remains = World::new(setting, shape_at(0), options.instruction_budget).run(count, fitting);
            fold.add(remains, &mut self.memory);
        } else {
            let mut first = 0;
            // Each block of a batch may spend what is left of the budget, so the first batch is no larger than what runs
            // at once: a kernel that never ends takes no longer than its budget.
            let mut batch_size = if options.parallel { rayon::current_num_threads() as u64 } else { 1 };
            let size = u64::from(shape.cluster_size());
            let clusters = blocks / size;
            while first < clusters && !fold.is_stopped {
                let end = clusters.min(first + batch_size);
                let left = options.instruction_budget.saturating_sub(fold.instructions);
                let memory = &self.memory;
                let setting = Setting { module: &module, kernel: &kernel, options, params: &params, memory };
                let run =
                    |c: u64| World::new(setting, shape_at(c * size), left).run(size as u32, size as u32);
                let batch: Vec<_> = if options.parallel {
                    (first..end).into_par_iter().map(run).collect()
                } else {
                    (first..end).map(run).collect()
                };
                for remains in batch {
                    fold.add(remains, &mut self.memory);
                    // Blocks after the one that stopped the launch never ran, however many did at once.
                    if fold.is_stopped {
                        break;
                    }
                }
                first = end;
                if options.parallel {
                    batch_size = (2 * batch_size).min(BATCH);
                }
            }
        }
        if !fold.is_stopped {
            for (variable, count) in self.memory.unwritten_outputs() {
                fold.log.add_unwritten(variable, count);
            }
        }
        Ok(Outcome::new(
            &module,
            &kernel,
            &shape,
            launch,
            fold.log,
            &fold.tallies,
            fold.output,
            fold.instructions,
        ))
    }
}

impl Device {
    /// The address of a workspace as a launch finds it.
    fn fresh_workspace(&mut self) -> Result<u64> {
        let workspace = match self.workspace {
            Some(workspace) => workspace,
            None => self.memory.allocate("grid workspace", WORKSPACE_BYTES)?,
        };
        self.workspace = Some(workspace);
        self.memory.write(workspace, 0, &[0; WORKSPACE_BYTES])?;
        Ok(workspace.address())
    }
}

fn refuse(launch: &Launch, reason: String) -> Error {
    Error::Launch { entry: launch.entry.clone(), reason }
}

fn block_bytes(kernel: &Kernel, shape: &Shape) -> u64 {
    let warps = u64::from(shape.threads().div_ceil(32));
    let registers = kernel.b32_count as u64 * 132 + kernel.b64_count as u64 * 260;
    registers.saturating_add(kernel.local_bytes.saturating_mul(64)).saturating_mul(warps)
}

fn check(kernel: &Kernel, launch: &Launch) -> Result<Shape> {
    // Three numbers of 32 bits: their product may not fit into 64.
    let threads = launch.block.iter().fold(1u64, |product, n| product.saturating_mul(u64::from(*n)));
    if threads == 0 || threads > 1024 || launch.block[2] > 64 {
        return Err(refuse(
            launch,
            format!(
                "block {:?} must have 1 to 1024 threads, at most 64 in z; more threads are more blocks of the grid",
                launch.block
            ),
        ));
    }
    if kernel.max_threads.is_some_and(|max| threads > u64::from(max)) {
        let max = kernel.max_threads.unwrap_or(0);
        return Err(refuse(
            launch,
            format!("{threads} threads, but the entry was compiled for at most {max}"),
        ));
    }
    let [gx, gy, gz] = launch.grid;
    if gx == 0 || gy == 0 || gz == 0 || gx > i32::MAX as u32 || gy > 65_535 || gz > 65_535 {
        return Err(refuse(
            launch,
            format!("grid {:?} must be 1 to 2147483647 in x and 1 to 65535 in y and z", launch.grid),
        ));
    }
    let shared = kernel.shared_bytes.saturating_add(u64::from(launch.shared_bytes));
    let limit = u64::from(launch.options.max_shared_bytes);
    if shared > limit {
        let fixed = kernel.shared_bytes;
        return Err(refuse(
            launch,
            format!(
                "{shared} bytes of shared memory ({fixed} declared, {} dynamic) are more than the limit of {limit} (`max_shared_bytes`, \
                 --max-shared)",
                launch.shared_bytes
            ),
        ));
    }
    // Every warp executes at least one instruction.
    let warps = threads.div_ceil(32) * u64::from(gx) * u64::from(gy) * u64::from(gz);
    let budget = launch.options.instruction_budget;
    if warps > budget {
        let reason = format!(
            "{warps} warps in a grid of {:?} cannot end within a budget of {budget} warp instructions: fewer blocks show the same mistakes, \
             or raise the budget (`instruction_budget`, --budget)",
            launch.grid
        );
        return Err(refuse(launch, reason));
    }
    let cluster = check_cluster(kernel, launch)?;
    let wants_grid = kernel.specials.iter().any(|(special, _)| matches!(special, Special::EnvReg(1 | 2)));
    if wants_grid && !launch.cooperative {
        let reason = "it synchronises its grid (%envreg1, %envreg2): launch it cooperatively, with `Launch::cooperative` or \
                      --cooperative";
        return Err(refuse(launch, reason.to_owned()));
    }
    let shape = Shape {
        grid: launch.grid,
        block: launch.block,
        cluster,
        is_cluster: kernel.cluster.is_some() || launch.cluster != [1; 3],
        shared_bytes: launch.shared_bytes,
        workspace: 0,
        first_block: 0,
    };
    let bytes = block_bytes(kernel, &shape);
    if bytes > MAX_BLOCK_BYTES {
        return Err(refuse(
            launch,
            format!("{bytes} bytes of registers and local memory per block are more than {MAX_BLOCK_BYTES}"),
        ));
    }
    Ok(shape)
}

/// The cluster of a launch: the entry's own, or what the launch says.
fn check_cluster(kernel: &Kernel, launch: &Launch) -> Result<[u32; 3]> {
    let cluster = match kernel.cluster {
        Some(own) if launch.cluster != [1; 3] && launch.cluster != own => {
            let given = launch.cluster;
            return Err(refuse(
                launch,
                format!("clusters of {given:?}, but the entry was compiled for {own:?}"),
            ));
        }
        Some(own) => own,
        None => launch.cluster,
    };
    let size = cluster.iter().fold(1u64, |product, n| product.saturating_mul(u64::from(*n)));
    if size == 0 || size > 16 {
        return Err(refuse(launch, format!("clusters of {cluster:?}; 1 to 16 blocks are possible")));
    }
    if launch.grid.iter().zip(cluster).any(|(grid, cluster)| grid % cluster != 0) {
        return Err(refuse(
            launch,
            format!("grid {:?} is no multiple of its clusters of {cluster:?}", launch.grid),
        ));
    }
    Ok(cluster)
}

fn pack_params(kernel: &Kernel, launch: &Launch) -> Result<Vec<u8>> {
    if kernel.params.len() != launch.args.len() {
        let (takes, given) = (kernel.params.len(), launch.args.len());
        let sizes: Vec<String> = kernel.params.iter().map(|param| param.bytes.to_string()).collect();
        let sizes = if sizes.is_empty() { String::new() } else { format!(" of {} bytes", sizes.join(", ")) };
        return Err(refuse(launch, format!("it takes {takes} arguments{sizes}, {given} were given")));
    }
    let mut params = vec![0; kernel.param_bytes as usize];
    for (i, (param, arg)) in kernel.params.iter().zip(&launch.args).enumerate() {
        let bytes = arg.bytes();
        if bytes.len() as u64 != param.bytes {
            return Err(refuse(
                launch,
                format!(
                    "argument {i} (`{}`) has {} bytes, {} were given",
                    param.name,
                    param.bytes,
                    bytes.len()
                ),
            ));
        }
        let at = param.offset as usize;
        params[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(params)
}
