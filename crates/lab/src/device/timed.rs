//! A kernel loaded on a GPU: graph replay alone or between foreign kernels, and single launches, cold and warm, with the clock
//! read around each sample.

use evosdpa::{Attention, gpu::OnGpu};
use evosdpa_core::Problem;
use evosdpa_cuda::{Event, Graph, Stream};
use evosdpa_oracle::inputs::Inputs;

use super::{
    Cuda, Loaded, Output, TimedKernel, Timing, Turned,
    cuda::{Set, Slot},
};
use crate::{Error, measure::Reading};

/// A timed graph holds launches for about this long, so that the clock's grain does not show.
const GRAPH_US: f64 = 300.0;
/// And no more launches than this.
const GRAPH_LAUNCHES_MAX: usize = 80;
/// Nor more memory than this for their outputs: every launch has one of its own, so that each can be held to its work.
const GRAPH_OUTPUT_BYTES_MAX: usize = 512 << 20;

pub(super) struct LoadedCuda<'a> {
    cuda: &'a Cuda,
    problem: Problem,
    /// What a user of the library would run, or the variant that was asked for by the same way.
    attention: Attention,
    sets: Vec<Set>,
    /// One per set, then more for the launches of a graph.
    slots: Vec<Slot>,
    timing: Timing,
    timed: Option<TimedGraph>,
}

/// Several launches, replayed at once.
struct TimedGraph {
    graph: Graph,
    /// By slot.
    launches: Vec<usize>,
    /// As many foreign kernels as there are launches, alone; where one runs before each launch.
    foreign: Option<Graph>,
}

impl<'a> LoadedCuda<'a> {
    pub(super) fn new(
        cuda: &'a Cuda,
        kernel: &str,
        problem: &Problem,
        inputs: &[Inputs],
    ) -> Result<Self, Error> {
        let device = cuda.handle();
        let sets = inputs.iter().map(|inputs| Set::upload(device, inputs)).collect::<Result<Vec<_>, _>>()?;
        let slots = (0..sets.len())
            .map(|set| Slot::new(device, problem, &sets, set))
            .collect::<Result<Vec<_>, _>>()?;
        let attention = cuda.plan(kernel, problem, &slots[0].tensors)?;
        device.reset_persisting_l2()?;
        let problem = *problem;
        Ok(Self { cuda, problem, attention, sets, slots, timing: Timing::Graph, timed: None })
    }

    fn stream(&self) -> &Stream {
        self.cuda.stream()
    }

    /// The plan. There is one: a CPU has no such device.
    fn plan(&self) -> &OnGpu {
        self.attention.gpu_plan().unwrap_or_else(|| unreachable!("planned on a GPU"))
    }

    fn launch(&self, slot: usize) -> Result<(), evosdpa::Error> {
        // SAFETY: the tensors are this slot's buffers and its set's, which live as long as `self`, and `LoadedCuda` waits
        // for every launch before it returns.
        unsafe { self.attention.run_on(self.stream().number(), &self.slots[slot].tensors) }
    }

    /// `before` runs outside the time.
    fn elapsed_us(
        &self,
        before: impl FnOnce() -> Result<(), Error>,
        work: impl FnOnce() -> Result<(), evosdpa::Error>,
    ) -> Result<f64, Error> {
        let (start, end) = (Event::new(self.stream())?, Event::new(self.stream())?);
        before()?;
        start.record(self.stream())?;
        work()?;
        end.record(self.stream())?;
        end.wait(self.cuda.limit(), &self.plan().describe())?;
        Ok(end.elapsed_us(&start)?)
    }

    fn capture(&mut self) -> Result<TimedGraph, Error> {
        let nothing = || Ok(());
        self.elapsed_us(nothing, || self.launch(0))?;
        // Several in a row, because a single one takes longer than its share of many.
        let burst = self.sets.len();
        let burst_us = self.elapsed_us(nothing, || (0..burst).try_for_each(|slot| self.launch(slot)))?;
        let once_us = burst_us / burst as f64;
        let sets = if self.timing == Timing::Warm { 1 } else { self.sets.len() };
        let affordable = (GRAPH_OUTPUT_BYTES_MAX / self.slots[0].output_bytes().max(1)).max(sets);
        let wanted = ((GRAPH_US / once_us.max(1.0)) as usize).clamp(1, GRAPH_LAUNCHES_MAX.min(affordable));
        // Whole turns through the sets, so that every set is used equally often.
        let count = wanted.next_multiple_of(sets);
        let mut launches: Vec<usize> = (0..sets).collect();
        while launches.len() < count {
            let set = launches.len() % sets;
            launches.push(self.slots.len());
            self.slots.push(Slot::new(self.cuda.handle(), &self.problem, &self.sets, set)?);
        }
        let stream = self.stream();
        if self.timing != Timing::Between {
            let graph = Graph::capture(stream, || launches.iter().try_for_each(|slot| self.launch(*slot)))?;
            return Ok(TimedGraph { graph, launches, foreign: None });
        }
        let foreign = self.cuda.foreign()?;
        let graph = Graph::capture(stream, || {
            launches.iter().try_for_each(|slot| {
                foreign.launch(stream)?;
                self.launch(*slot)
            })
        })?;
        let alone = Graph::capture(stream, || {
            launches.iter().try_for_each(|_| Ok::<_, Error>(foreign.launch(stream)?))
        })?;
        Ok(TimedGraph { graph, launches, foreign: Some(alone) })
    }

    fn graph(&mut self) -> Result<&TimedGraph, Error> {
        if self.timed.is_none() {
            self.timed = Some(self.capture()?);
        }
        // Just put there.
        Ok(self.timed.as_ref().unwrap_or_else(|| unreachable!("captured above")))
    }

    /// One sample, with `before` and `after` in the stream's order around it and outside the time.
    fn sample_us(
        &mut self,
        set: usize,
        before: impl FnOnce(&Self) -> Result<(), Error>,
        after: impl FnOnce(&Self) -> Result<(), Error>,
    ) -> Result<f64, Error> {
        if matches!(self.timing, Timing::Graph | Timing::Warm | Timing::Between) {
            self.graph()?;
            let this = &*self;
            let Some(TimedGraph { graph, launches, foreign }) = &this.timed else {
                unreachable!("captured above")
            };
            let total_us = this.elapsed_us(|| before(this), || Ok(graph.launch(this.stream())?))?;
            after(this)?;
            // Right after the other, so that the clocks are the same.
            let replay = |foreign: &Graph| this.elapsed_us(|| Ok(()), || Ok(foreign.launch(this.stream())?));
            let foreign_us = foreign.as_ref().map_or(Ok(0.0), replay)?;
            return Ok((total_us - foreign_us) / launches.len() as f64);
        }
        let this = &*self;
        let prepare = || {
            before(this)?;
            match this.timing {
                Timing::Cold => Ok(this.cuda.flush()?.flush(this.stream())?),
                _ => Ok(()),
            }
        };
        let time_us = this.elapsed_us(prepare, || this.launch(set))?;
        after(this)?;
        Ok(time_us)
    }
}

impl Loaded for LoadedCuda<'_> {
    fn variant(&self) -> Option<String> {
        Some(self.attention.variant())
    }

    fn run(&mut self, set: usize) -> Result<Output, Error> {
        self.slots[set].poison()?;
        self.elapsed_us(|| Ok(()), || self.launch(set))?;
        self.plan().check_counters()?;
        self.slots[set].download(&self.problem)
    }

    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        for set in &self.sets {
            if let Some(name) = set.changed()? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}

impl TimedKernel for LoadedCuda<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        self.sample_us(set, |_| Ok(()), |_| Ok(()))
    }

    fn time_alone_us(&mut self, set: usize) -> Result<f64, Error> {
        self.elapsed_us(|| Ok(()), || self.launch(set))
    }

    fn read(&mut self, set: usize) -> Result<Reading, Error> {
        let time_us = self.sample_us(
            set,
            |this| Ok(this.cuda.probe().start(this.stream())?),
            |this| Ok(this.cuda.probe().stop(this.stream())?),
        )?;
        let end = Event::new(self.stream())?;
        end.record(self.stream())?;
        end.wait(self.cuda.limit(), "the clock probe")?;
        Ok(Reading { time_us, clock_ghz: self.cuda.probe().cycles_per_ns()? })
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), Error> {
        self.timing = timing;
        self.timed = None;
        // That was the only graph of this launch, whose counters are its own.
        self.plan().reuse_captured_counters();
        self.slots.truncate(self.sets.len());
        Ok(())
    }

    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        self.sets[set].refill(inputs, turned)
    }

    fn poison(&mut self) -> Result<(), Error> {
        self.slots.iter_mut().try_for_each(Slot::poison)
    }

    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error> {
        let slots = match &self.timed {
            Some(timed) => timed.launches.clone(),
            None => vec![set],
        };
        slots
            .into_iter()
            .map(|slot| Ok((self.slots[slot].set, self.slots[slot].download(&self.problem)?)))
            .collect()
    }
}
