//! A world: blocks that run together on one host thread, and the scheduler that interleaves their warps.

use super::barrier::{BARRIERS, Barriers};
use super::launch::{Options, Schedule, Shape};
use super::random::Random;
use super::run::Context;
use super::warp::{State, Warp};
use crate::count::counters::Tally;
use crate::decode::Kernel;
use crate::hazard::clock::{Clock, Numbering};
use crate::hazard::log::{Kind, Log};
use crate::hazard::sync::SyncPlaces;
use crate::memory::DeviceMemory;
use crate::memory::shared::SharedMemory;
use crate::memory::view::{Page, View};
use crate::module::Module;
use std::rc::Rc;

/// Instructions a warp runs before the next one gets its turn.
const TURN: u32 = 256;

/// A schedule that holds warps back lets everybody run once in so many rounds: a warp may wait for another in a
/// loop, and hardware does not starve it for ever.
const FAIR_EVERY: u64 = 32;

/// A block that is running.
struct Block {
    number: u32,
    shared: SharedMemory,
    barriers: Barriers,
    warps: Vec<Warp>,
}

/// What a launch gives every world.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) module: &'a Module,
    pub(super) kernel: &'a Kernel,
    pub(super) options: &'a Options,
    pub(super) params: &'a [u8],
    pub(super) memory: &'a DeviceMemory,
}

/// What a world leaves behind.
pub(super) struct Remains {
    pub(super) first_block: u64,
    pub(super) pages: Vec<Page>,
    pub(super) log: Log,
    pub(super) tallies: Vec<Tally>,
    pub(super) output: String,
    pub(super) instructions: u64,
    pub(super) is_stopped: bool,
}

/// The running world.
pub(super) struct World<'a> {
    setting: Setting<'a>,
    shape: Shape,
    numbering: Numbering,
    blocks: Vec<Block>,
    view: View<'a>,
    places: SyncPlaces,
    log: Log,
    tallies: Vec<Tally>,
    output: String,
    random: Random,
    budget: u64,
    rounds: u64,
    is_stopped: bool,
}

impl<'a> World<'a> {
    pub(super) fn new(setting: Setting<'a>, shape: Shape, budget: u64) -> Self {
        let random = Random::new(setting.options.seed, shape.first_block);
        World {
            numbering: Numbering::new(shape.threads()),
            blocks: Vec::new(),
            view: View::new(setting.memory),
            places: SyncPlaces::default(),
            log: Log::default(),
            tallies: vec![Tally::default(); setting.kernel.code.len()],
            output: String::new(),
            random,
            budget,
            rounds: 0,
            is_stopped: false,
            setting,
            shape,
        }
    }

    /// Runs `count` blocks, at most `resident` at a time.
    pub(super) fn run(mut self, count: u32, resident: u32) -> Remains {
        let start = self.budget;
        let mut next = 0;
        loop {
            while next < count && self.blocks.len() < resident.max(1) as usize {
                self.start_block(next);
                next += 1;
            }
            if self.blocks.is_empty() || self.is_stopped {
                break;
            }
            if self.budget == 0 {
                self.report_budget();
                break;
            }
            if !self.step() && !self.force_collective() {
                self.report_deadlock();
                break;
            }
            self.blocks.retain(|b| !b.warps.iter().all(Warp::is_done));
        }
        Remains {
            first_block: self.shape.first_block,
            pages: self.view.into_pages(),
            log: self.log,
            tallies: self.tallies,
            output: self.output,
            instructions: start - self.budget,
            is_stopped: self.is_stopped,
        }
    }

    fn start_block(&mut self, number: u32) {
        let kernel = self.setting.kernel;
        let threads = self.shape.threads();
        let known = Rc::new(Clock::new(self.numbering, number, threads));
        let warps = (0..threads.div_ceil(32))
            .map(|w| {
                let warp = Warp::new(kernel, &self.shape, self.numbering, number, w, &known);
                if self.setting.options.explain { warp.with_memoir() } else { warp }
            })
            .collect();
        let shared = SharedMemory::new(kernel.shared_bytes as usize + self.shape.shared_bytes as usize);
        let barriers = Barriers::new(self.numbering, number, threads);
        self.blocks.push(Block { number, shared, barriers, warps });
    }

    /// Gives turns to warps as the schedule says; `false` if none could run.
    fn step(&mut self) -> bool {
        let mut ready: Vec<(usize, usize)> = Vec::new();
        for (b, block) in self.blocks.iter().enumerate() {
            for (w, warp) in block.warps.iter().enumerate() {
                if warp.has_ready() {
                    ready.push((b, w));
                }
            }
        }
        if ready.is_empty() {
            return false;
        }
        let copies = |this: &Self, (b, w): (usize, usize)| this.blocks[b].warps[w].copies_issued;
        self.rounds += 1;
        match self.setting.options.schedule {
            Schedule::RoundRobin | Schedule::CopiesEarly | Schedule::CopiesLate => {}
            Schedule::ProducerLate | Schedule::ConsumerLate if self.rounds.is_multiple_of(FAIR_EVERY) => {}
            Schedule::Random => {
                let pick = ready[self.random.below(ready.len() as u64) as usize];
                ready = vec![pick];
            }
            Schedule::ProducerLate => {
                // The fewest copies issued first; among equals the highest warp.
                ready.sort_by_key(|at| (copies(self, *at), std::cmp::Reverse(*at)));
                ready.truncate(1.max(ready.len() / 2));
            }
            Schedule::ConsumerLate => {
                ready.sort_by_key(|at| (std::cmp::Reverse(copies(self, *at)), *at));
                ready.truncate(1.max(ready.len() / 2));
            }
        }
        for (b, w) in ready {
            let turn = match self.setting.options.schedule {
                Schedule::Random => 1 + self.random.below(64) as u32,
                _ => TURN,
            };
            self.run_warp(b, w, turn);
            if self.is_stopped || self.budget == 0 {
                break;
            }
        }
        true
    }

    fn run_warp(&mut self, b: usize, w: usize, turn: u32) {
        let block = &mut self.blocks[b];
        let mut cx = Context {
            kernel: self.setting.kernel,
            shape: &self.shape,
            options: self.setting.options,
            numbering: self.numbering,
            block: block.number,
            params: self.setting.params,
            shared: &mut block.shared,
            barriers: &mut block.barriers,
            view: &mut self.view,
            places: &mut self.places,
            log: &mut self.log,
            tallies: &mut self.tallies,
            output: &mut self.output,
            random: &mut self.random,
            budget: &mut self.budget,
            is_stopped: &mut self.is_stopped,
        };
        block.warps[w].run(&mut cx, turn);
        if self.setting.options.schedule == Schedule::RoundRobin {
            block.warps[w].land_copies(&mut cx, |_| true);
        }
        if std::mem::take(&mut block.barriers.is_touched) {
            for id in 0..BARRIERS {
                if let Some(completion) = block.barriers.complete(id) {
                    for warp in &mut block.warps {
                        warp.released(&self.setting.kernel.code, id as u32, &completion);
                    }
                }
            }
        }
    }

    /// Nobody can run, but some lanes wait for lanes of their own warp that do not come: let them go on, and say so.
    fn force_collective(&mut self) -> bool {
        for block in &mut self.blocks {
            for warp in &mut block.warps {
                if let Some(group) = warp.groups.iter_mut().find(|g| g.state == State::Together) {
                    group.state = State::Ready;
                    group.is_forced = true;
                    return true;
                }
            }
        }
        false
    }

    fn at(&self, pc: u32) -> String {
        let info = &self.setting.kernel.info[pc as usize];
        let source = self.setting.module.describe(info.location);
        source.unwrap_or_else(|| format!("PTX line {}", info.line))
    }

    fn report_budget(&mut self) {
        let mut running: Vec<String> = Vec::new();
        let mut site = (0, 0, 0);
        for block in &self.blocks {
            for warp in &block.warps {
                for group in warp.groups.iter().filter(|g| g.state == State::Ready) {
                    if running.is_empty() {
                        site = (group.pc, block.number, warp.index * 32 + group.mask.trailing_zeros());
                    }
                    if running.len() < 4 {
                        running.push(format!(
                            "block {} warp {} at {}",
                            block.number,
                            warp.index,
                            self.at(group.pc)
                        ));
                    }
                }
            }
        }
        let detail = format!(
            "{} warp instructions executed; still running: {}. A loop that never ends, or raise the budget",
            self.setting.options.instruction_budget,
            running.join(", ")
        );
        self.log.add(Kind::Budget, site.0, None, (site.1, site.2), || detail);
        self.is_stopped = true;
    }

    /// Who waits where, and for how many.
    fn report_deadlock(&mut self) {
        let mut picture = Vec::new();
        let mut site = None;
        'blocks: for block in &self.blocks {
            for id in 0..BARRIERS {
                let barrier = block.barriers.get(id);
                let mut waiting = Vec::new();
                for warp in &block.warps {
                    for g in warp.groups.iter().filter(|g| g.state == State::Barrier(id as u32)) {
                        site.get_or_insert((g.pc, block.number, warp.index * 32 + g.mask.trailing_zeros()));
                        waiting.push(format!("warp {} ({})", warp.index, self.at(g.pc)));
                    }
                }
                if !waiting.is_empty() {
                    let (arrived, expected) = match barrier.expected {
                        Some(expected) => (barrier.arrived, expected),
                        None => (barrier.lanes, block.barriers.live()),
                    };
                    picture.push(format!(
                        "block {} barrier {id}: {arrived} of {expected} threads arrived, waiting: {}",
                        block.number,
                        waiting.join(", ")
                    ));
                }
            }
            for warp in &block.warps {
                for g in warp.groups.iter().filter(|g| g.state == State::Meeting) {
                    site.get_or_insert((g.pc, block.number, warp.index * 32 + g.mask.trailing_zeros()));
                    picture.push(format!(
                        "warp {} lanes {:#010x} wait for the rest of their warp at {}",
                        warp.index,
                        g.mask,
                        self.at(g.pc)
                    ));
                }
            }
            if picture.len() > 16 {
                break 'blocks;
            }
        }
        let (pc, block, thread) = site.unwrap_or((0, 0, 0));
        let detail = picture.join("; ");
        self.log.add(Kind::Deadlock, pc, None, (block, thread), || detail);
        self.is_stopped = true;
    }
}
