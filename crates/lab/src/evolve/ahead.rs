//! What can be done before the device is free: compiling, the resource gate, and the simulator at `tiny`. It runs ahead in
//! threads of its own, so that the device never waits for a compiler.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
};

use evosdpa::choose;
use evosdpa_core::{DType, Problem};
use evosdpa_cuda::{Builder, worker::CompilePool};
use evosdpa_kernels::{ProblemFacts, Registry, Target, VariantId};
use evosdpa_oracle::{Case, inputs::Family};
use serde::{Deserialize, Serialize};

use super::{
    log::Resources,
    span::{Span, timed},
};
use crate::{
    Error, ErrorKind,
    device::Sim,
    gate::{GateResult, Verdict, correctness, resources},
    variants::Job,
};

/// What is known of a candidate before it runs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Prepared {
    /// Gates in the order they ran; the first that fails is the last.
    pub gates: Vec<GateResult>,
    /// What it uses.
    pub resources: Option<Resources>,
    /// What it took.
    pub spans: Vec<Span>,
}

impl Prepared {
    /// Whether there is nothing to run: a gate failed, or the machine could not compile it.
    pub fn stopped(&self) -> bool {
        let stops = |gate: &GateResult| match gate.verdict {
            Verdict::Pass => false,
            Verdict::Fail(_) => true,
            Verdict::Unavailable(_) => gate.gate == resources::COMPILE,
        };
        self.gates.iter().any(stops)
    }
}

/// Something that prepares candidates.
pub trait Ahead {
    /// Begins.
    fn start(&mut self, label: &str);

    /// A candidate that was begun is not waited for, as far as is known now; it may be begun again.
    fn forget(&mut self, label: &str) {
        let _ = label;
    }

    /// Waits until a candidate that was begun is ready.
    fn wait(&mut self, label: &str) -> Result<Prepared, Error>;

    /// Takes in a new source for a kernel, under a name of its own.
    fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        let _ = (name, source);
        Err(Error::Tune(format!(
            "{of} is part of the program: only CUDA kernels can be given another source"
        )))
    }

    /// A kernel's source, where it has one.
    fn source(&self, kernel: &str) -> Option<String> {
        let _ = kernel;
        None
    }

    /// The files that make a kernel: name and text.
    fn files(&self, kernel: &str) -> Vec<(String, String)> {
        let _ = kernel;
        Vec::new()
    }
}

/// For kernels that need no preparation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nothing;

impl Ahead for Nothing {
    fn start(&mut self, _label: &str) {}

    fn wait(&mut self, _label: &str) -> Result<Prepared, Error> {
        Ok(Prepared::default())
    }
}

/// The gate that the simulator is.
pub const SIM: &str = "sim";

/// Compiles CUDA kernels in worker processes and looks at them.
pub struct Compiling {
    registry: Arc<Registry>,
    orders: Sender<(String, Arc<Registry>)>,
    ready: Receiver<(String, Option<Result<Prepared, Error>>)>,
    waiting: HashMap<String, Result<Prepared, Error>>,
    /// Ordered, and not come back.
    ordered: HashSet<String>,
    /// Of those, what is still wanted: a thread passes over the rest, and gives nothing back for it.
    wanted: Arc<Mutex<HashSet<String>>>,
}

struct Desk {
    builder: Builder,
    target: Target,
    problems: Vec<Problem>,
    /// The case that the simulator runs, unless it is not wanted.
    tiny: Option<Case>,
}

impl Compiling {
    /// As many at once as the pool has workers. With `simulate`, each is also run at `tiny` by the simulator.
    pub fn new(
        registry: Registry,
        target: Target,
        problems: &[Problem],
        pool: CompilePool,
        simulate: bool,
    ) -> Result<Self, Error> {
        let threads = pool.workers();
        let dtype = problems.first().map_or(DType::F16, Problem::dtype);
        let tiny = Problem::new("tiny:causal".parse()?, dtype)?.with_lse(false);
        let desk = Arc::new(Desk {
            builder: Builder::new()?.with_pool(pool),
            target,
            problems: problems.to_vec(),
            tiny: simulate.then(|| Case::new(tiny, Family::Normal, 7, Some(8))),
        });
        let (orders, queue) = channel::<(String, Arc<Registry>)>();
        let (done, ready) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let wanted = Arc::new(Mutex::new(HashSet::new()));
        for _ in 0..threads {
            let (queue, wanted) = (Arc::clone(&queue), Arc::clone(&wanted));
            let (desk, done) = (Arc::clone(&desk), done.clone());
            std::thread::spawn(move || {
                loop {
                    let order = held(&queue).recv();
                    let Ok((label, registry)) = order else { break };
                    let is_wanted = held(&wanted).contains(&label);
                    let prepared = is_wanted.then(|| desk.prepare(&label, &registry));
                    if done.send((label, prepared)).is_err() {
                        break;
                    }
                }
            });
        }
        let (waiting, ordered) = (HashMap::new(), HashSet::new());
        Ok(Self { registry: Arc::new(registry), orders, ready, waiting, ordered, wanted })
    }

    fn order(&mut self, label: &str) {
        self.ordered.insert(label.to_owned());
        // The threads live as long as this sender.
        let _ = self.orders.send((label.to_owned(), Arc::clone(&self.registry)));
    }
}

/// What a lock holds. Nothing panics while one of these is held, so what is in it is whole.
fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Desk {
    fn prepare(&self, label: &str, registry: &Arc<Registry>) -> Result<Prepared, Error> {
        let mut prepared = Prepared::default();
        let VariantId { kernel, tunables } = label.parse()?;
        let kernel = registry.kernel(&kernel)?;
        for problem in &self.problems {
            let facts = ProblemFacts::try_from(problem)?;
            let variant = choose::variant(kernel, &facts, &self.target, &tunables)?;
            let built = timed("compile", &mut prepared.spans, || {
                let built = self.builder.build(&variant);
                // A worker that was killed says nothing about the source.
                let again = built.as_ref().is_err_and(|error| error.kind() == ErrorKind::Machine);
                if again { self.builder.build(&variant) } else { built }
            });
            let job = Job { dtype: facts.dtype, problem: facts, target: self.target, variant };
            let row = resources::check(&job, built, None)?;
            let stopped = row.usage.is_none() || row.gates.iter().any(|gate| gate.verdict.is_fail());
            if prepared.gates.is_empty() || stopped {
                prepared.gates = row.gates;
                prepared.resources = row.usage.map(|usage| Resources {
                    registers: usage.registers,
                    smem_bytes: usage.smem_static_bytes + usage.smem_dynamic_bytes.unwrap_or(0),
                    spill_bytes: usage.spill_store_bytes + usage.spill_load_bytes,
                    occupancy: usage.occupancy.map_or(0.0, |occupancy| occupancy.fraction),
                });
            }
            if stopped {
                return Ok(prepared);
            }
        }
        if let Some(case) = &self.tiny {
            let result = timed("sim", &mut prepared.spans, || self.simulate(label, case, registry))?;
            prepared.gates.push(result);
        }
        Ok(prepared)
    }

    fn simulate(&self, label: &str, case: &Case, registry: &Arc<Registry>) -> Result<GateResult, Error> {
        let sim = Sim::with_builder(registry.as_ref().clone(), self.builder.clone());
        Ok(correctness::check(&sim, label, case, None)?.gate(SIM))
    }
}

impl Ahead for Compiling {
    fn start(&mut self, label: &str) {
        held(&self.wanted).insert(label.to_owned());
        if !self.waiting.contains_key(label) && !self.ordered.contains(label) {
            self.order(label);
        }
    }

    fn forget(&mut self, label: &str) {
        held(&self.wanted).remove(label);
    }

    fn wait(&mut self, label: &str) -> Result<Prepared, Error> {
        loop {
            if let Some(prepared) = self.waiting.remove(label) {
                held(&self.wanted).remove(label);
                return prepared;
            }
            let Ok((name, prepared)) = self.ready.recv() else {
                return Err(Error::Tune("the threads that compile have ended".to_owned()));
            };
            self.ordered.remove(&name);
            match prepared {
                Some(prepared) => drop(self.waiting.insert(name, prepared)),
                // Passed over, and begun again since.
                None if held(&self.wanted).contains(&name) => self.order(&name),
                None => {}
            }
        }
    }

    fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        Arc::make_mut(&mut self.registry).register_source(of, name, source)?;
        Ok(())
    }

    fn source(&self, kernel: &str) -> Option<String> {
        self.registry.kernel(kernel).ok().map(|kernel| kernel.source.to_string())
    }

    fn files(&self, kernel: &str) -> Vec<(String, String)> {
        let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        let of = |kernel: &evosdpa_kernels::Kernel| kernel.files().into_iter().map(own).collect();
        self.registry.kernel(kernel).map(of).unwrap_or_default()
    }
}
