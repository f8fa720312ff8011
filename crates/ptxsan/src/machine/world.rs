//! A world: blocks that run together on one host thread, and the scheduler that interleaves their warps.

use super::asynchronous::barrier_state::Mbarriers;
use super::asynchronous::cluster::{Cluster, Pool, Visits};
use super::asynchronous::flight::{BulkFlight, Course};
use super::asynchronous::wgmma::{Operands, Warpgroups};
use super::barrier::{BARRIERS, Barriers};
use super::launch::{Options, Schedule, Shape};
use super::run::{Context, Resident, Stir};
use super::spin::SpinWatch;
use super::warp::{Parked, State, Warp};
use crate::count::counters::Tally;
use crate::decode::Kernel;
use crate::finding::Kind;
use crate::hazard::clock::{Clock, Numbering};
use crate::hazard::log::Log;
use crate::hazard::sync::SyncPlaces;
use crate::memory::DeviceMemory;
use crate::memory::shared::SharedMemory;
use crate::memory::view::{UsedPage, View};
use crate::module::Module;
use crate::random::Random;
use std::collections::HashMap;
use std::rc::Rc;

/// Instructions a warp runs before the next one gets its turn.
const TURN: u32 = 256;

/// A schedule that holds warps back lets everybody run once in so many rounds: a warp may wait for another in a
/// loop, and hardware does not starve it for ever.
const FAIR_EVERY: u64 = 32;

/// So often waits that nothing else can end are answered with no before it is called a deadlock: a kernel may do something else
/// when it hears it.
const GIVE_UPS: u32 = 3;

/// A block that is running.
struct Block {
    number: u32,
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
    pub(super) pages: Vec<UsedPage>,
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
    residents: HashMap<u32, Box<Resident>>,
    clusters: HashMap<u32, Cluster>,
    flights: Vec<BulkFlight>,
    operands: Operands,
    stirs: Vec<Stir>,
    /// Rounds in which waits gave up, since anything last happened.
    give_ups: u32,
    view: View<'a>,
    places: SyncPlaces,
    log: Log,
    tallies: Vec<Tally>,
    output: String,
    random: Random,
    budget: u64,
    rounds: u64,
    spin: SpinWatch,
    is_stopped: bool,
}

impl<'a> World<'a> {
    pub(super) fn new(setting: Setting<'a>, shape: Shape, budget: u64) -> Self {
        let random = Random::new(setting.options.seed, shape.first_block);
        World {
            numbering: Numbering::new(shape.threads(), setting.kernel.has_agents),
            blocks: Vec::new(),
            residents: HashMap::new(),
            clusters: HashMap::new(),
            flights: Vec::new(),
            operands: Operands::default(),
            stirs: Vec::new(),
            give_ups: 0,
            view: View::new(setting.memory),
            places: SyncPlaces::default(),
            log: Log::default(),
            tallies: vec![Tally::default(); setting.kernel.code.len()],
            output: String::new(),
            random,
            budget,
            rounds: 0,
            spin: SpinWatch::default(),
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
            let size = self.shape.cluster_size();
            while next < count
                && (self.blocks.is_empty() || self.blocks.len() + size as usize <= resident as usize)
            {
                let threads = size * self.shape.threads();
                self.clusters.insert(next / size, Cluster::new(threads));
                (next..next + size).for_each(|number| self.start_block(number));
                next += size;
            }
            if self.blocks.is_empty() || self.is_stopped {
                break;
            }
            if self.budget == 0 {
                self.report_budget();
                break;
            }
            if !self.step() && !self.land_one() && !self.force_collective() && !self.give_up() {
                self.report_deadlock();
                break;
            }
            self.retire();
            if self.spin.is_due(start - self.budget) && self.is_spinning(start - self.budget) {
                self.report_spin();
                break;
            }
        }
        // What nobody waits for happens all the same.
        while !self.is_stopped && self.land_one() {}
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
                if self.setting.options.explain { warp.with_sync_trace() } else { warp }
            })
            .collect();
        let warp_count = threads.div_ceil(32);
        let resident = Box::new(Resident {
            shared: SharedMemory::new(kernel.shared_with(self.shape.shared_bytes), &kernel.reserved),
            barriers: Barriers::new(self.numbering, number, threads),
            mbarriers: Mbarriers::default(),
            warpgroups: Warpgroups::new(warp_count),
            pool: kernel.registers.map(|registers| Pool::new(warp_count, registers)),
            has_exited: false,
            visits: Visits::default(),
        });
        self.residents.insert(number, resident);
        self.blocks.push(Block { number, warps });
    }

    /// Blocks whose warps are done leave; their memory stays until their cluster has left.
    fn retire(&mut self) {
        if !self.blocks.iter().any(|b| b.warps.iter().all(Warp::is_done)) {
            return;
        }
        let size = self.shape.cluster_size();
        let (done, left): (Vec<Block>, Vec<Block>) =
            std::mem::take(&mut self.blocks).into_iter().partition(|b| b.warps.iter().all(Warp::is_done));
        self.blocks = left;
        for block in done {
            if let Some(resident) = self.residents.get_mut(&block.number) {
                resident.has_exited = true;
                let known = block.warps.iter().flat_map(|warp| &warp.known);
                resident.visits.report_unawaited(self.numbering, block.number % size, known, &mut self.log);
            }
            for flight in self.flights.iter().filter(|flight| flight.block == block.number) {
                let Course::Across { to, .. } = &flight.course else { continue };
                self.log.add(Kind::ClusterLifetime, flight.pc, None, (flight.block, flight.thread), || {
                    format!(
                        "a block ends while its copy to the block of rank {} may still read its shared memory: a cluster barrier behind \
                         the wait for the copy must keep it alive",
                        to.block % size
                    )
                });
            }
            let cluster = block.number / size;
            if !self.blocks.iter().any(|b| b.number / size == cluster) {
                // Copies to global memory may outlive their block; those to shared memory have nowhere to go.
                while self.land_where(|flight| flight.block / size == cluster) {}
                for number in cluster * size..(cluster + 1) * size {
                    let Some(resident) = self.residents.remove(&number) else { continue };
                    for (pc, detail) in resident.mbarriers.unsettled() {
                        self.log.add(Kind::Mbarrier, pc, None, (number, 0), || detail);
                    }
                }
                self.clusters.remove(&cluster);
            }
        }
    }

    /// Lands a copy that is on its way, if there is one: which one is the schedule's choice.
    fn land_one(&mut self) -> bool {
        if self.flights.is_empty() {
            return false;
        }
        let at = match self.setting.options.schedule {
            Schedule::Random => self.random.below(self.flights.len() as u64) as usize,
            Schedule::CopiesLate => self.flights.len() - 1,
            _ => 0,
        };
        self.land_at(at);
        true
    }

    fn land_where(&mut self, which: impl Fn(&BulkFlight) -> bool) -> bool {
        match self.flights.iter().position(which) {
            Some(at) => {
                self.land_at(at);
                true
            }
            None => false,
        }
    }

    fn land_at(&mut self, at: usize) {
        let flight = self.flights.remove(at);
        self.give_ups = 0;
        let number = flight.block;
        self.enter(number, |cx| cx.land_bulk(flight));
        self.wake(number);
    }

    /// Waits that nothing can end are answered with no, a few times.
    fn give_up(&mut self) -> bool {
        self.give_ups += 1;
        if self.give_ups > GIVE_UPS {
            return false;
        }
        let mut any = false;
        let groups = self.blocks.iter_mut().flat_map(|b| &mut b.warps).flat_map(|w| &mut w.groups);
        for group in groups.filter(|g| matches!(g.state, State::Parked(Parked::Mbarrier(_)))) {
            group.state = State::Ready;
            group.gives_up = true;
            any = true;
        }
        any
    }

    /// Lets groups go on that wait for what has changed, seen from this block.
    fn wake(&mut self, number: u32) {
        let size = self.shape.cluster_size();
        for stir in std::mem::take(&mut self.stirs) {
            self.give_ups = 0;
            for block in &mut self.blocks {
                let is_meant = match stir {
                    Stir::Mbarrier(owner, _) => block.number == owner,
                    Stir::Cluster => block.number / size == number / size,
                    Stir::Warpgroup | Stir::Registers => block.number == number,
                };
                let wanted = match stir {
                    Stir::Mbarrier(_, offset) => Parked::Mbarrier(offset),
                    Stir::Cluster => Parked::Cluster,
                    Stir::Warpgroup => Parked::Warpgroup,
                    Stir::Registers => Parked::Registers,
                };
                if is_meant {
                    let groups = block.warps.iter_mut().flat_map(|w| &mut w.groups);
                    groups.filter(|g| g.state == State::Parked(wanted)).for_each(|g| g.state = State::Ready);
                }
            }
        }
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
        let number = self.blocks[b].number;
        // The warp is taken out while it runs, so that it can reach everything else.
        let mut warps = std::mem::take(&mut self.blocks[b].warps);
        let schedule = self.setting.options.schedule;
        let code = &self.setting.kernel.code;
        self.enter(number, |cx| {
            warps[w].turns += 1;
            warps[w].run(cx, turn);
            if let Some((siblings, group)) = cx.warpgroups.take_waited() {
                for warp in warps.iter_mut().take(siblings.end).skip(siblings.start) {
                    warp.compute_products(cx, group);
                }
            }
            if schedule == Schedule::RoundRobin {
                warps[w].land_copies(cx, |_, _| true);
                warps[w].compute_products(cx, u32::MAX);
            }
            if std::mem::take(&mut cx.barriers.is_touched) {
                for id in 0..BARRIERS {
                    if let Some(completion) = cx.barriers.complete(id) {
                        for warp in &mut warps {
                            warp.released(code, id as u32, &completion);
                        }
                        cx.shared.shadow.forget_reads(warps.iter().flat_map(Warp::live_clocks));
                    }
                }
            }
        });
        self.blocks[b].warps = warps;
        self.wake(number);
        match schedule {
            Schedule::RoundRobin => while self.land_one() {},
            Schedule::Random if self.random.below(4) == 0 => drop(self.land_one()),
            _ => {}
        }
    }

    /// Lends a block's things, and the world's, to `work`.
    fn enter<R>(&mut self, number: u32, work: impl FnOnce(&mut Context<'_, 'a>) -> R) -> Option<R> {
        let size = self.shape.cluster_size();
        let mut own = self.residents.remove(&number)?;
        let result = self.clusters.get_mut(&(number / size)).map(|cluster| {
            let mut cx = Context {
                kernel: self.setting.kernel,
                shape: &self.shape,
                options: self.setting.options,
                numbering: self.numbering,
                block: number,
                params: self.setting.params,
                shared: &mut own.shared,
                barriers: &mut own.barriers,
                mbarriers: &mut own.mbarriers,
                warpgroups: &mut own.warpgroups,
                pool: &mut own.pool,
                cluster,
                cluster_first: number / size * size,
                peers: &mut self.residents,
                flights: &mut self.flights,
                operands: &mut self.operands,
                stirs: &mut self.stirs,
                view: &mut self.view,
                places: &mut self.places,
                log: &mut self.log,
                tallies: &mut self.tallies,
                output: &mut self.output,
                random: &mut self.random,
                budget: &mut self.budget,
                is_stopped: &mut self.is_stopped,
            };
            work(&mut cx)
        });
        self.residents.insert(number, own);
        result
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

    /// Whether all that still run go round for ever.
    fn is_spinning(&mut self, instructions: u64) -> bool {
        // Copies on their way will change memory; a warp that leaves may open a barrier.
        let live: u64 = self.blocks.iter().flat_map(|b| &b.warps).map(|w| u64::from(w.live)).sum();
        let mut warps = self.blocks.iter().flat_map(|b| &b.warps);
        let in_flight = !self.flights.is_empty() || warps.any(|warp| !warp.flights.is_empty());
        let pending = live + if in_flight { self.rounds } else { 0 };
        let warps = self.blocks.iter().flat_map(|b| b.warps.iter().map(|warp| (b.number, warp)));
        self.spin.look(self.setting.kernel, &self.tallies, instructions, pending, warps)
    }

    fn report_spin(&mut self) {
        let (running, site) = self.still_running();
        let detail = format!(
            "nothing can change any more what these warps ask for in a loop: {}. Whoever is to end the loop has left, waits \
             behind it, or does not run beside it",
            running.join(", ")
        );
        self.log.add(Kind::Deadlock, site.0, None, (site.1, site.2), || detail);
        self.is_stopped = true;
    }

    /// Up to four warps that can run, and where the first of them is.
    fn still_running(&self) -> (Vec<String>, (u32, u32, u32)) {
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
        (running, site)
    }

    fn report_budget(&mut self) {
        let (running, site) = self.still_running();
        let detail = format!(
            "{} warp instructions executed; still running: {}. A loop that never ends, or raise the budget",
            self.setting.options.instruction_budget,
            running.join(", ")
        );
        self.log.add(Kind::Budget, site.0, None, (site.1, site.2), || detail);
        self.is_stopped = true;
    }

    /// The warps of a block whose groups are in a state, each with its place.
    fn waiting(
        &self,
        block: &Block,
        site: &mut Option<(u32, u32, u32)>,
        is_meant: impl Fn(State) -> bool,
    ) -> Vec<String> {
        let mut waiting = Vec::new();
        for warp in &block.warps {
            for g in warp.groups.iter().filter(|g| is_meant(g.state)) {
                site.get_or_insert((g.pc, block.number, warp.index * 32 + g.mask.trailing_zeros()));
                waiting.push(format!("warp {} ({})", warp.index, self.at(g.pc)));
            }
        }
        waiting
    }

    /// mbarriers, the cluster's barrier, warpgroups and registers that warps of a block wait for.
    fn picture_parked(
        &self,
        block: &Block,
        resident: &Resident,
        site: &mut Option<(u32, u32, u32)>,
        picture: &mut Vec<String>,
    ) {
        let mut reasons: Vec<Parked> = Vec::new();
        for state in block.warps.iter().flat_map(|w| &w.groups).map(|g| g.state) {
            if let State::Parked(parked) = state
                && !reasons.contains(&parked)
            {
                reasons.push(parked);
            }
        }
        // What is wrong by itself comes before what follows from it.
        reasons.sort_by_key(|parked| !resident.is_cause(*parked));
        for parked in reasons {
            let waiting = self.waiting(block, site, |state| state == State::Parked(parked)).join(", ");
            let what = match parked {
                Parked::Mbarrier(offset) => resident.mbarriers.describe(offset, &self.shared_name(offset)),
                Parked::Cluster => {
                    let cluster = self.clusters.get(&(block.number / self.shape.cluster_size()));
                    format!("cluster barrier: {}", cluster.map_or_else(String::new, Cluster::describe))
                }
                Parked::Warpgroup => {
                    "wgmma.wait_group: other warps of the warpgroup have not come so far".to_owned()
                }
                Parked::Registers => {
                    let pool = resident.pool.as_ref().map_or_else(String::new, Pool::describe);
                    format!("setmaxnreg: {pool}")
                }
            };
            picture.push(format!("block {} {what}, waiting: {waiting}", block.number));
        }
    }

    /// ` (full+8)`: the variable that a place in shared memory lies in; nothing where there is none.
    fn shared_name(&self, offset: u32) -> String {
        let found = self.setting.kernel.shared_variable_at(offset.into(), self.shape.shared_bytes.into());
        found.map_or_else(String::new, |(v, _)| format!(" ({}+{})", v.name, u64::from(offset) - v.address))
    }

    /// Who waits where, and for how many.
    fn report_deadlock(&mut self) {
        let mut picture = Vec::new();
        let mut site = None;
        for block in &self.blocks {
            let Some(resident) = self.residents.get(&block.number) else { continue };
            self.waiting(block, &mut site, |state| matches!(state, State::Parked(p) if resident.is_cause(p)));
        }
        'blocks: for block in &self.blocks {
            let Some(resident) = self.residents.get(&block.number) else { continue };
            for id in 0..BARRIERS {
                let barrier = resident.barriers.get(id);
                let waiting = self.waiting(block, &mut site, |state| state == State::Barrier(id as u32));
                if !waiting.is_empty() {
                    let (arrived, expected) = match barrier.expected {
                        Some(expected) => (barrier.arrived, expected),
                        None => (barrier.lanes, resident.barriers.live()),
                    };
                    picture.push(format!(
                        "block {} barrier {id}: {arrived} of {expected} threads arrived, waiting: {}",
                        block.number,
                        waiting.join(", ")
                    ));
                }
            }
            self.picture_parked(block, resident, &mut site, &mut picture);
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
