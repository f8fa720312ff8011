//! `wgmma`: products of a warpgroup, which run on their own between issue and wait.
//!
//! Each warp computes its own sixteen rows. A *chain* is a set of accumulators in flight and the products still to be added to it;
//! registers learn the sums when a wait covers the last of them. Copies of an accumulator in flight by `mov`, which compilers put at
//! the edges of loops and the assembler removes, take the place of the original.

use crate::decode::{CollectiveKind, Kernel, LeftOperand, Op, Watch, Wgmma};
use crate::finding::Kind;
use crate::hazard::clock::{Proxy, join_distinct};
use crate::hazard::log::Other;
use crate::machine::access::{Agent, Request};
use crate::machine::run::{Context, Stir, for_lanes};
use crate::machine::warp::Warp;
use crate::parse::ast::Space;
use crate::tensor::Lanes;
use crate::tensor::wgmma::{Descriptor, Piece, Product, WARP_ROWS};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// One product that is not computed yet.
struct Step {
    pc: u32,
    group: u32,
    left: Left,
    right: Places,
    adds: bool,
}

/// Where the 16-byte pieces of an operand lie in shared memory.
type Places = Rc<[u32]>;

enum Left {
    Memory(Places),
    Values(Vec<f64>),
}

/// Accumulators in flight.
struct Chain {
    words: Vec<Lanes>,
    /// The register that each word will be in.
    registers: Vec<u32>,
    steps: Vec<Step>,
    /// The group of the last product.
    group: u32,
    shape: (usize, usize),
    pc: u32,
}

/// What a register is to the products in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Role {
    /// 1 + chain, if the register is an accumulator in flight.
    chain: u32,
    /// The group and instruction of the product that reads it as A; group 0: none.
    left_group: u32,
    left_pc: u32,
    /// It was touched after so many fences.
    touched: u32,
    touched_pc: u32,
}

/// The products of a warp.
#[derive(Default)]
pub(crate) struct Products {
    chains: Vec<Option<Chain>>,
    roles: Vec<Role>,
    /// Fences executed, and where the last one stands.
    fences: u32,
    fence_pc: u32,
    /// The open group, and up to which group all is done.
    open: u32,
    done: u32,
    /// Products issued so far.
    issued: u32,
}

/// More groups than a warp can commit: it has ended.
const EXITED: u32 = u32::MAX;

/// What the warps of a block know of each other's products.
#[derive(Default)]
pub(crate) struct Warpgroups {
    /// Groups that each warp has committed; of one that has exited, all.
    committed: Vec<u32>,
    /// The instructions of each warpgroup's products, in order, as its first warp issued them.
    order: Vec<Vec<u32>>,
    /// Up to which group each warpgroup's products were waited for, by the first of its warps.
    waited: Vec<u32>,
    /// The warpgroup that has just been waited for.
    newly_waited: Option<u32>,
}

/// Every warp of a warpgroup reads all of B.
const ALL_WARPS: u32 = 4;
/// So many operands are kept in mind: a ring of stages comes round again and again.
const MOST_PLACES: usize = 1024;

/// Places of operands that were asked for, of any block.
#[derive(Default)]
pub(crate) struct Operands {
    /// By instruction, descriptor and the warp whose rows they are; of B, [`ALL_WARPS`].
    all: HashMap<(u32, u64, u32), Places>,
    /// Of each instruction the last B: its bytes and their values, which are the same for the four warps.
    values: HashMap<u32, Converted>,
}

/// The bytes of an operand's pieces, and what they are as numbers.
type Converted = (Vec<[u8; 16]>, Rc<[f64]>);

impl Operands {
    /// Where an operand lies that a descriptor names.
    fn of(&mut self, pc: u32, descriptor: u64, warp: u32, product: &Product) -> Places {
        if self.all.len() > MOST_PLACES {
            self.all.clear();
        }
        let all = self.all.entry((pc, descriptor, warp)).or_insert_with(|| {
            let descriptor = Descriptor::decode(descriptor);
            let pieces: Vec<Piece> = if warp == ALL_WARPS {
                product.pieces(descriptor, product.b_major, 0, product.shape.n).collect()
            } else {
                let first = warp as usize * WARP_ROWS;
                product.pieces(descriptor, product.a_major, first, WARP_ROWS).collect()
            };
            pieces.iter().map(|piece| piece.address as u32).collect()
        });
        Rc::clone(all)
    }

    /// The values of B, from the bytes of its pieces.
    fn right(&mut self, pc: u32, pieces: Vec<[u8; 16]>, product: &Product) -> Rc<[f64]> {
        if let Some((_, values)) = self.values.get(&pc).filter(|(known, _)| *known == pieces) {
            return Rc::clone(values);
        }
        let values: Rc<[f64]> = product.right_from_memory(&pieces).into();
        if self.values.len() > MOST_PLACES {
            self.values.clear();
        }
        self.values.insert(pc, (pieces, Rc::clone(&values)));
        values
    }
}

impl Warpgroups {
    pub(crate) fn new(warps: u32) -> Self {
        let count = warps.div_ceil(4) as usize;
        Warpgroups {
            committed: vec![0; warps as usize],
            order: vec![Vec::new(); count],
            waited: vec![0; count],
            newly_waited: None,
        }
    }

    /// Whether the other warps of a warpgroup must compute what one of them has just waited for.
    pub(in crate::machine) fn is_newly_waited(&self) -> bool {
        self.newly_waited.is_some()
    }

    /// The warps that must, and up to which group of products.
    pub(in crate::machine) fn take_waited(&mut self) -> Option<(Range<usize>, u32)> {
        let warpgroup = self.newly_waited.take()? as usize;
        Some((4 * warpgroup..4 * warpgroup + 4, self.waited[warpgroup]))
    }

    fn siblings(&self, warp: u32) -> &[u32] {
        let first = (warp / 4 * 4) as usize;
        &self.committed[first..self.committed.len().min(first + 4)]
    }
}

impl Products {
    fn role(&mut self, register: u32) -> &mut Role {
        let at = register as usize;
        if self.roles.len() <= at {
            self.roles.resize(at + 1, Role::default());
        }
        &mut self.roles[at]
    }

    fn is_left_in_flight(&self, role: &Role) -> bool {
        role.left_group > self.done
    }

    /// What must come before the registers of a product in flight are touched: no wait reaches a group that is still open.
    fn missing(&self, group: u32) -> &'static str {
        match group > self.open {
            true => "wgmma.commit_group and wgmma.wait_group must come first",
            false => "wgmma.wait_group must come first",
        }
    }
}

impl Warp {
    /// An instruction touches registers that products use: finds what is still in flight.
    pub(in crate::machine) fn watch(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, watch: &Watch) {
        let products = self.products.get_or_insert_default();
        if watch.is_move
            && let ([from], [to]) = (&*watch.reads, &*watch.writes)
        {
            let chain = products.role(*from).chain;
            if chain != 0 {
                products.role(*from).chain = 0;
                products.role(*to).chain = chain;
                if let Some(Some(chain)) = products.chains.get_mut(chain as usize - 1) {
                    for register in chain.registers.iter_mut().filter(|r| *r == from) {
                        *register = *to;
                    }
                }
                return;
            }
        }
        let fences = products.fences + 1;
        let mut found = None;
        for &register in &watch.reads {
            let role = products.role(register);
            role.touched = fences;
            role.touched_pc = pc;
            if role.chain != 0 {
                found = found.or(Some((register, role.chain, true)));
            }
        }
        for &register in &watch.writes {
            let role = *products.role(register);
            if role.chain != 0 {
                found = found.or(Some((register, role.chain, false)));
            } else if products.is_left_in_flight(&role) {
                let other = Other { pc: role.left_pc, block: u64::from(cx.block), thread: self.index * 32 };
                let missing = products.missing(role.left_group);
                cx.log.add(
                    Kind::Wgmma,
                    pc,
                    Some(other),
                    (cx.block, self.index * 32 + mask.trailing_zeros().min(31)),
                    || format!("a register of A is overwritten while its wgmma is in flight: {missing}"),
                );
            }
            let role = products.role(register);
            role.touched = fences;
            role.touched_pc = pc;
        }
        if let Some((_, chain, is_read)) = found {
            let in_flight = products.chains.get(chain as usize - 1).and_then(Option::as_ref);
            let (issued, missing) =
                in_flight.map_or((pc, products.missing(0)), |c| (c.pc, products.missing(c.group)));
            let other = Other { pc: issued, block: u64::from(cx.block), thread: self.index * 32 };
            let verb = if is_read { "read" } else { "overwritten" };
            cx.log.add(
                Kind::Wgmma,
                pc,
                Some(other),
                (cx.block, self.index * 32 + mask.trailing_zeros().min(31)),
                || format!("an accumulator is {verb} while its wgmma is in flight: {missing}"),
            );
            // It is said once; the value is there for whoever goes on.
            self.finish_chain(cx, chain);
        }
    }

    pub(in crate::machine) fn wgmma_kind(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        kind: &CollectiveKind,
    ) {
        match kind {
            CollectiveKind::WgmmaFence => {
                let products = self.products.get_or_insert_default();
                products.fences += 1;
                products.fence_pc = pc;
            }
            CollectiveKind::WgmmaCommit => {
                let products = self.products.get_or_insert_default();
                products.open += 1;
                cx.warpgroups.committed[self.index as usize] = products.open;
                cx.stirs.push(Stir::Warpgroup);
            }
            CollectiveKind::WgmmaWait(pending) => self.wait_products(cx, pc, lanes, *pending),
            CollectiveKind::Wgmma(wgmma) => self.issue_product(cx, pc, lanes, wgmma),
            _ => {}
        }
    }

    /// Whether a wait must let the other warps of the warpgroup catch up: they compute together.
    pub(in crate::machine) fn awaits_siblings(&mut self, cx: &Context<'_, '_>, pending: u32) -> bool {
        let open = self.products.get_or_insert_default().open;
        let needed = open.saturating_sub(pending);
        cx.warpgroups.siblings(self.index).iter().any(|committed| *committed < needed)
    }

    fn issue_product(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, op: &Wgmma) {
        self.check_order_of_warps(cx, pc);
        let first = lanes.trailing_zeros() as usize & 31;
        let right = cx.operands.of(pc, self.lane(op.b, first), ALL_WARPS, &op.product);
        let (left, touched) = match &op.a {
            LeftOperand::Descriptor(register) => {
                let descriptor = self.lane(*register, first);
                (Left::Memory(cx.operands.of(pc, descriptor, self.index % 4, &op.product)), None)
            }
            LeftOperand::Registers(list) => {
                let words: Vec<Lanes> = list.iter().map(|r| self.regs.b32[r.index as usize]).collect();
                (Left::Values(op.product.left_from_registers(&words)), Some(list))
            }
        };
        let adds = {
            let (predicate, negated) = op.scale_d;
            (self.lane(predicate, first) != 0) != negated
        };
        self.read_operands(cx, pc, &left, &right);
        let products = self.products.get_or_insert_default();
        let (fences, group) = (products.fences + 1, products.open + 1);
        if products.fences == 0 {
            cx.report(Kind::Wgmma, pc, self.index, lanes, || {
                "no wgmma.fence comes before the first wgmma".into()
            });
        }
        for register in touched.into_iter().flat_map(|list| list.iter()) {
            let role = products.role(register.index);
            let is_touched = role.touched == fences && role.touched_pc != pc;
            let (touched_pc, chain) = (role.touched_pc, role.chain);
            role.left_group = group;
            role.left_pc = pc;
            if is_touched || chain != 0 {
                unfenced(cx, self.index, pc, touched_pc, "a register of A");
            }
        }
        let shape = (op.product.shape.n, op.product.shape.k);
        let mut chain = 0;
        for &register in &op.d {
            let role = *products.role(register);
            if role.chain == 0 && role.touched == fences {
                unfenced(cx, self.index, pc, role.touched_pc, "an accumulator");
            }
            if products.is_left_in_flight(&role) && role.left_pc != pc {
                cx.report(Kind::Wgmma, pc, self.index, lanes, || {
                    "an accumulator is a register of A of a wgmma in flight".into()
                });
            }
            chain = role.chain.max(chain);
        }
        // Registers that were touched before the last fence and after the one before it: what that fence is for.
        let left_registers = touched.into_iter().flat_map(|list| list.iter()).map(|r| r.index);
        let used = left_registers.chain(op.d.iter().copied());
        let owed = used.filter(|r| products.roles[*r as usize].touched + 1 == fences).count();
        if products.fences > 0 {
            cx.tallies[products.fence_pc as usize].work += owed as u64;
        }
        let step = Step { pc, group, left, right, adds };
        let continues = chain != 0
            && products.chains[chain as usize - 1]
                .as_ref()
                .is_some_and(|c| *c.registers == *op.d && c.shape.0 == shape.0);
        if !continues {
            if chain != 0 {
                cx.report(Kind::Wgmma, pc, self.index, lanes, || {
                    "accumulators of products of different shapes, one of them in flight: wgmma.wait_group must come between".into()
                });
                self.finish_chain(cx, chain);
            }
            chain = self.new_chain(op, shape, pc);
        }
        if let Some(Some(chain)) = self.products.get_or_insert_default().chains.get_mut(chain as usize - 1) {
            chain.steps.push(step);
            chain.group = group;
            chain.pc = pc;
        }
        if cx.options.schedule.lands_early(cx.random) {
            self.advance_chain(cx, chain, u32::MAX);
        }
    }

    fn new_chain(&mut self, op: &Wgmma, shape: (usize, usize), pc: u32) -> u32 {
        let words = op.d.iter().map(|r| self.regs.b32[*r as usize]).collect();
        let chain = Chain { words, registers: op.d.to_vec(), steps: Vec::new(), group: 0, shape, pc };
        let products = self.products.get_or_insert_default();
        let at = match products.chains.iter().position(Option::is_none) {
            Some(free) => {
                products.chains[free] = Some(chain);
                free
            }
            None => {
                products.chains.push(Some(chain));
                products.chains.len() - 1
            }
        };
        for &register in &op.d {
            products.role(register).chain = at as u32 + 1;
        }
        at as u32 + 1
    }

    /// All warps of a warpgroup execute the same products in the same order.
    fn check_order_of_warps(&mut self, cx: &mut Context<'_, '_>, pc: u32) {
        let products = self.products.get_or_insert_default();
        let at = products.issued as usize;
        products.issued += 1;
        let siblings = cx.warpgroups.siblings(self.index);
        if siblings.len() < 4 || siblings.contains(&EXITED) {
            cx.report(Kind::Wgmma, pc, self.index, 1, || {
                "not all four warps of its warpgroup are there".into()
            });
        }
        let order = &mut cx.warpgroups.order[self.index as usize / 4];
        if at == order.len() {
            order.push(pc);
        } else if let Some(other) = order.get(at).copied().filter(|other| *other != pc) {
            let other = Other { pc: other, block: u64::from(cx.block), thread: self.index / 4 * 128 };
            cx.log.add(Kind::Wgmma, pc, Some(other), (cx.block, self.index * 32), || {
                "the warps of a warpgroup execute different wgmma instructions".to_owned()
            });
        }
    }

    /// Holds the operands in shared memory against everybody's accesses.
    fn read_operands(&mut self, cx: &mut Context<'_, '_>, pc: u32, left: &Left, right: &Places) {
        let group = self.products.get_or_insert_default().open + 1;
        let numbering = cx.numbering;
        let agent = Agent {
            identity: numbering.identity(cx.block, numbering.wgmma(self.index / 4)),
            time: group,
            proxy: Some(Proxy::Shared),
        };
        let request = Request::read(pc, 16).by(agent);
        let left = if let Left::Memory(places) = left { &places[..] } else { &[] };
        self.read_by_agent(cx, right.iter().chain(left), &request);
    }

    /// Reads of an agent that knows what all lanes of the warp know.
    fn read_by_agent<'p>(
        &mut self,
        cx: &mut Context<'_, '_>,
        places: impl Iterator<Item = &'p u32>,
        request: &Request,
    ) {
        let lane = self.live.trailing_zeros() as usize & 31;
        let known = Rc::clone(&self.known[lane]);
        let known = if self.alike(self.live) == self.live || !cx.options.check_races {
            known
        } else {
            let mut clock = (*known).clone();
            join_distinct(&mut clock, (0..32).filter(|l| self.live >> l & 1 == 1).map(|l| &self.known[l]));
            clock.settle();
            Rc::new(clock)
        };
        let own = std::mem::replace(&mut self.known[lane], known);
        let places = places.map(|place| (u64::from(*place), 16));
        self.check_each(cx, Space::Shared, lane, places, request, |_, _, _, _| {});
        self.known[lane] = own;
    }

    /// Computes a chain's products up to a group.
    fn advance_chain(&mut self, cx: &mut Context<'_, '_>, chain: u32, group: u32) {
        let Some(products) = &mut self.products else { return };
        let Some(Some(chain)) = products.chains.get_mut(chain as usize - 1) else { return };
        let count = chain.steps.iter().take_while(|s| s.group <= group).count();
        for step in chain.steps.drain(..count) {
            let Some(op) = product_at(cx.kernel, step.pc) else { continue };
            let read = |places: &Places| -> Vec<[u8; 16]> {
                let piece = |at: &u32| cx.shared.data.get(*at as usize..).and_then(|raw| raw.first_chunk());
                places.iter().map(|at| piece(at).copied().unwrap_or([0; 16])).collect()
            };
            let left = match step.left {
                Left::Memory(places) => op.product.left_from_memory(&read(&places)),
                Left::Values(values) => values,
            };
            let right = cx.operands.right(step.pc, read(&step.right), &op.product);
            op.product.multiply(&left, &right, step.adds, &mut chain.words, cx.options.accumulate);
        }
    }

    /// Computes all products of a chain and puts its sums into registers.
    fn finish_chain(&mut self, cx: &mut Context<'_, '_>, chain: u32) {
        self.advance_chain(cx, chain, u32::MAX);
        let Some(products) = &mut self.products else { return };
        let Some(done) = products.chains.get_mut(chain as usize - 1).and_then(Option::take) else { return };
        for (register, words) in done.registers.iter().zip(&done.words) {
            self.regs.b32[*register as usize] = *words;
            let role = products.role(*register);
            if role.chain == chain {
                role.chain = 0;
            }
        }
    }

    /// What was issued up to a group may be computed by now.
    pub(in crate::machine) fn compute_products(&mut self, cx: &mut Context<'_, '_>, group: u32) {
        let count = self.products.as_ref().map_or(0, |p| p.chains.len());
        for chain in 0..count {
            self.advance_chain(cx, chain as u32 + 1, group);
        }
    }

    fn wait_products(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, pending: u32) {
        let products = self.products.get_or_insert_default();
        let done = products.open.saturating_sub(pending);
        products.done = products.done.max(done);
        // A wait is the warpgroup's: who goes on may hand over what the others read.
        let waited = &mut cx.warpgroups.waited[self.index as usize / 4];
        if done > *waited {
            *waited = done;
            cx.warpgroups.newly_waited = Some(self.index / 4);
        }
        let chains: Vec<(u32, bool)> = products
            .chains
            .iter()
            .enumerate()
            .filter_map(|(i, c)| c.as_ref().map(|c| (i as u32 + 1, c.group <= done)))
            .collect();
        for (chain, is_over) in chains {
            if is_over {
                self.finish_chain(cx, chain);
            } else {
                self.advance_chain(cx, chain, done);
            }
        }
        if cx.options.check_races {
            self.learn_group(cx, pc, lanes, done);
        }
    }

    fn learn_group(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, group: u32) {
        let slot = cx.numbering.wgmma(self.index / 4);
        let mut rest = lanes;
        while rest != 0 {
            let known = Rc::clone(&self.known[rest.trailing_zeros() as usize]);
            let alike = self.alike(rest);
            rest &= !alike;
            if known.time_of(slot) >= group {
                continue;
            }
            let mut clock = (*known).clone();
            clock.raise(slot, group);
            clock.settle();
            let clock = Rc::new(clock);
            for_lanes(alike, |lane| self.learn(lane, pc, Rc::clone(&clock)));
        }
    }

    /// A warp ends: the others of its warpgroup do not wait for it, and nothing of it may be in flight.
    pub(in crate::machine) fn leave_products(&mut self, cx: &mut Context<'_, '_>, pc: u32) {
        let issued = self.products.as_ref().map_or(0, |p| p.issued as usize);
        if self.products.as_ref().is_some_and(|p| p.chains.iter().any(Option::is_some)) {
            cx.report(Kind::Wgmma, pc, self.index, 1, || "a warp ends while its wgmma is in flight".into());
        }
        let order = cx.warpgroups.order[self.index as usize / 4].len();
        if issued < order {
            cx.report(Kind::Wgmma, pc, self.index, 1, || {
                format!("a warp ends after {issued} wgmma instructions, others of its warpgroup execute {order} or more")
            });
        }
        cx.warpgroups.committed[self.index as usize] = EXITED;
        cx.stirs.push(Stir::Warpgroup);
    }
}

/// A register that a product reads or adds to was touched since the last fence.
fn unfenced(cx: &mut Context<'_, '_>, warp: u32, pc: u32, touched: u32, what: &str) {
    let other = Other { pc: touched, block: u64::from(cx.block), thread: warp * 32 };
    cx.log.add(Kind::Wgmma, pc, Some(other), (cx.block, warp * 32), || {
        format!(
            "{what} was touched since the last wgmma.fence: one must come between. If the source has it, the compiler put the register's value \
             behind it: asm volatile(\"\" : \"+f\"(register) :: \"memory\") in front of the fence keeps it there"
        )
    });
}

fn product_at(kernel: &Kernel, pc: u32) -> Option<&Wgmma> {
    match &kernel.code.get(pc as usize)?.op {
        Op::Collective(collective) => match &collective.kind {
            CollectiveKind::Wgmma(wgmma) => Some(wgmma),
            _ => None,
        },
        _ => None,
    }
}
