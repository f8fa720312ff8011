//! mbarriers, bulk copies, `wgmma`, clusters and what else is asynchronous on Hopper.

use super::build::Builder;
use super::lanes::{self, Args};
use super::memory::apply;
use super::opcode::Opcode;
use super::{
    Arrival, AsyncStore, Bank, Bulk, ClusterBarrier, CollectiveKind, Combine, Extent, LeftOperand,
    MbarrierOp, Op, Phase, Scope, TensorCombine, Wgmma,
};
use crate::error::Result;
use crate::memory::window;
use crate::parse::ast::{Operand, Space, Type};
use crate::tensor::wgmma::{Major, Product};
use crate::tensor::{Accumulator, Element};

/// The operations of reducing copies.
const REDUCTIONS: [&str; 8] = ["add", "min", "max", "inc", "dec", "and", "or", "xor"];

impl Builder<'_> {
    /// Decodes one of these; `false` when it is none.
    pub(super) fn asynchronous(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<bool> {
        let before = self.has_agents;
        self.has_agents = true;
        match (op.name, op.parts.first().copied()) {
            ("mbarrier", Some(what)) => self.mbarrier(op, what, operands)?,
            ("cp", Some("async")) if op.parts.get(1) == Some(&"bulk") => self.bulk(op, operands)?,
            ("cp", Some("reduce")) if op.has("bulk") => self.bulk(op, operands)?,
            ("st", _) | ("red", _) if op.has("async") => self.async_store(op, operands)?,
            ("wgmma", Some(what)) => self.wgmma(op, what, operands)?,
            ("setmaxnreg", Some(what)) => self.set_registers(what, operands)?,
            ("barrier", Some("cluster")) => self.cluster_barrier(op)?,
            ("fence", _) if op.has("mbarrier_init") => self.emit(Op::InitFence, Args::default()),
            ("fence", Some("proxy")) => self.proxy_fence(op)?,
            ("griddepcontrol", Some("wait")) => self.emit(Op::LaunchWait, Args::default()),
            ("griddepcontrol", Some("launch_dependents")) => self.emit(Op::Nop, Args::default()),
            ("mapa", _) => self.mapa(op, operands)?,
            ("getctarank", _) => self.rank_of(op, operands)?,
            ("prefetch", _) if op.has("tensormap") => self.emit(Op::Nop, Args::default()),
            ("createpolicy", _) => {
                // A policy changes no values: any number will do.
                self.has_agents = before;
                let d = self.destination(self.at(operands, 0)?, Type::B64)?;
                let zero = self.constant(Bank::B64, 64, 0).index;
                self.emit(Op::Alu(lanes::b64_1(|a| a)), Args { d: d.index, a: zero, b: 0, c: 0 });
            }
            _ => {
                self.has_agents = before;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn space_of(op: &Opcode<'_>) -> Space {
        if op.parts.iter().any(|p| p.starts_with("shared")) { Space::Shared } else { Space::Generic }
    }

    fn mbarrier(&mut self, op: &Opcode<'_>, what: &str, operands: &[Operand]) -> Result<()> {
        let space = Self::space_of(op);
        let mbarrier = match what {
            "init" => MbarrierOp::Init {
                address: self.address(self.at(operands, 0)?, space)?,
                count: self.operand(operands, 1, Type::U32)?,
            },
            "inval" => MbarrierOp::Inval { address: self.address(self.at(operands, 0)?, space)? },
            "expect_tx" | "complete_tx" => {
                let address = self.address(self.at(operands, 0)?, space)?;
                let bytes = self.operand(operands, 1, Type::U32)?;
                match what {
                    "expect_tx" => MbarrierOp::ExpectTx { address, bytes },
                    _ => MbarrierOp::CompleteTx { address, bytes },
                }
            }
            "arrive" | "arrive_drop" => MbarrierOp::Arrive(self.arrival(op, space, operands)?),
            "test_wait" | "try_wait" => {
                let address = self.address(self.at(operands, 1)?, space)?;
                let phase = match op.has("parity") {
                    true => Phase::Parity(self.operand(operands, 2, Type::U32)?),
                    false => Phase::Token(self.operand(operands, 2, Type::B64)?),
                };
                let d = self.destination(self.at(operands, 0)?, Type::Pred)?;
                let scope = super::memory::scope(op).unwrap_or(Scope::Cta);
                let (acquires, tests) = (!op.has("relaxed"), what == "test_wait");
                MbarrierOp::Wait { d, address, phase, acquires, scope, tests }
            }
            "pending_count" => {
                let token = self.operand(operands, 1, Type::B64)?;
                MbarrierOp::PendingCount { d: self.destination(self.at(operands, 0)?, Type::B32)?, token }
            }
            _ => return Err(self.unsupported("this operation on an mbarrier")),
        };
        self.emit(Op::Mbarrier(Box::new(mbarrier)), Args::default());
        Ok(())
    }

    fn arrival(&mut self, op: &Opcode<'_>, space: Space, operands: &[Operand]) -> Result<Arrival> {
        // `arrive` without a token may leave its place out.
        let has_token = !matches!(operands.first(), Some(Operand::Address { .. }));
        let rest = &operands[usize::from(has_token).min(operands.len())..];
        let address = self.address(self.at(rest, 0)?, space)?;
        let number = rest.get(1).map(|o| self.source_register(o, Type::U32)).transpose()?;
        let announces = op.has("expect_tx");
        if announces && number.is_none() {
            return Err(self.bad("needs a number of bytes".into()));
        }
        let d = match operands.first() {
            Some(d) if has_token => Some(self.destination(d, Type::B64)?),
            _ => None,
        };
        Ok(Arrival {
            address,
            d,
            count: number.filter(|_| !announces),
            bytes: number.filter(|_| announces),
            drops: op.has("arrive_drop"),
            no_complete: op.has("noComplete"),
            releases: !op.has("relaxed"),
            scope: super::memory::scope(op).unwrap_or(Scope::Cta),
        })
    }

    /// `cp.async.mbarrier.arrive{.noinc}.shared.b64 [barrier]`
    pub(super) fn arrive_after_copies(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        self.has_agents = true;
        let address = self.address(self.at(operands, 0)?, Self::space_of(op))?;
        let arrive = MbarrierOp::AfterCopies { address, is_counted: op.has("noinc") };
        self.emit(Op::Mbarrier(Box::new(arrive)), Args::default());
        Ok(())
    }

    fn bulk(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        if op.has("commit_group") {
            self.emit(Op::BulkCommit, Args::default());
            return Ok(());
        }
        if op.has("wait_group") {
            let Some(Operand::Int(n)) = operands.first() else {
                return Err(self.bad("needs a number of groups".into()));
            };
            let pending = u32::try_from(*n).unwrap_or(u32::MAX);
            self.emit(Op::BulkWait { pending, reads_only: op.has("read") }, Args::default());
            return Ok(());
        }
        if op.parts.iter().any(|p| p.starts_with("im2col") || p.contains("gather4") || p.contains("scatter4"))
        {
            return Err(self.unsupported(
                "im2col, gather and scatter copies are not simulated; tiled ones are, in up to five dimensions",
            ));
        }
        let bulk = match () {
            () if op.has("prefetch") => {
                self.extent(op, operands, 0, 1)?;
                Bulk::Prefetch
            }
            // To shared memory, reporting to an mbarrier.
            () if op.has("mbarrier::complete_tx::bytes") && op.has("global") => {
                let to = self.address(self.at(operands, 0)?, Space::Shared)?;
                let (from, next) = self.extent(op, operands, 1, 2)?;
                let barrier = self.address(self.at(operands, next)?, Space::Shared)?;
                let multicast = match op.has("multicast::cluster") {
                    true => Some(self.any_source(self.at(operands, next + 1)?, Type::U16)?),
                    false => None,
                };
                Bulk::Load { to, from, barrier, multicast }
            }
            () if op.has("mbarrier::complete_tx::bytes") => {
                let to = self.address(self.at(operands, 0)?, Space::Shared)?;
                let from = self.address(self.at(operands, 1)?, Space::Shared)?;
                let bytes = self.operand(operands, 2, Type::U32)?;
                let barrier = self.address(self.at(operands, 3)?, Space::Shared)?;
                let combine =
                    if op.name == "cp" && op.has("reduce") { Some(self.combine(op)?) } else { None };
                Bulk::Send { to, from, bytes, barrier, combine }
            }
            () if op.has("bulk_group") => {
                let from = self.address(self.at(operands, 1)?, Space::Shared)?;
                let (to, _) = self.extent(op, operands, 0, 2)?;
                let combine = match (op.has("reduce"), &to) {
                    (false, _) => None,
                    (true, Extent::Linear { .. }) => Some(TensorCombine::Typed(self.combine(op)?)),
                    (true, Extent::Tensor { .. }) => Some(TensorCombine::ByMap(self.reduction(op)?)),
                };
                // Sums of several blocks are sums only where the blocks see one memory.
                self.communicates |= combine.is_some();
                Bulk::Store { to, from, combine }
            }
            () => return Err(self.unsupported("this kind of bulk copy")),
        };
        self.emit(Op::Bulk(Box::new(bulk)), Args::default());
        Ok(())
    }

    /// The global side of a copy at operand `at`: a box of a tensor, or an address with a size at operand `size`. Also returns which
    /// operand comes behind both.
    fn extent(
        &mut self,
        op: &Opcode<'_>,
        operands: &[Operand],
        at: usize,
        size: usize,
    ) -> Result<(Extent, usize)> {
        if !op.has("tensor") {
            let address = self.address(self.at(operands, at)?, Space::Global)?;
            return Ok((
                Extent::Linear { address, bytes: self.operand(operands, size, Type::U32)? },
                size + 1,
            ));
        }
        let Operand::Tensor { map, offset, coordinates } = self.at(operands, at)? else {
            return Err(self.bad("expected `[map, {coordinates}]`".into()));
        };
        let rank = op.parts.iter().find_map(|p| p.strip_suffix('d')?.parse::<usize>().ok());
        if rank != Some(coordinates.len()) {
            return Err(
                self.bad(format!("{} coordinates for a tensor of {rank:?} dimensions", coordinates.len()))
            );
        }
        let address = Operand::Address { base: map.clone(), offset: *offset };
        let map = self.address(&address, Space::Generic)?;
        let coordinates =
            coordinates.iter().map(|c| self.source_register(c, Type::S32)).collect::<Result<_>>()?;
        Ok((Extent::Tensor { map, coordinates }, at + 1))
    }

    fn reduction(&self, op: &Opcode<'_>) -> Result<&'static str> {
        let found = REDUCTIONS.into_iter().find(|r| op.has(r));
        found.ok_or_else(|| self.unsupported("this reduction"))
    }

    fn combine(&mut self, op: &Opcode<'_>) -> Result<Combine> {
        let operation = self.reduction(op)?;
        let kind = op.kind().ok_or_else(|| self.unsupported("a reduction without a type"))?;
        let apply = apply(operation, kind).ok_or_else(|| self.unsupported("this operation on this type"))?;
        Ok(Combine { bytes: kind.bytes(), apply: std::sync::Arc::new(move |old, a| apply(old, a, 0)) })
    }

    /// `st.async…[to], value, [barrier]` and `red.async…`
    fn async_store(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().ok_or_else(|| self.unsupported("no type"))?;
        if !op.has("mbarrier::complete_tx::bytes") || !matches!(kind.bytes(), 4 | 8) {
            return Err(self.unsupported("only forms that report to an mbarrier, of 32 or 64 bits"));
        }
        let registers = Self::elements(self.at(operands, 1)?)
            .iter()
            .map(|o| self.source_register(o, kind))
            .collect::<Result<Vec<_>>>()?;
        if registers.len() != op.vector() {
            return Err(self.bad(format!("{} registers for a vector of {}", registers.len(), op.vector())));
        }
        let to = self.address(self.at(operands, 0)?, Space::Shared)?;
        let barrier = self.address(self.at(operands, 2)?, Space::Shared)?;
        let combine = if op.name == "red" { Some(self.combine(op)?) } else { None };
        let store = AsyncStore { to, barrier, bytes: kind.bytes(), registers: registers.into(), combine };
        self.emit(Op::AsyncStore(Box::new(store)), Args::default());
        Ok(())
    }

    fn wgmma(&mut self, op: &Opcode<'_>, what: &str, operands: &[Operand]) -> Result<()> {
        match what {
            "fence" => self.collective(CollectiveKind::WgmmaFence, None),
            "commit_group" => self.collective(CollectiveKind::WgmmaCommit, None),
            "wait_group" => {
                let Some(Operand::Int(n)) = operands.first() else {
                    return Err(self.bad("needs a number of groups".into()));
                };
                let pending = u32::try_from(*n).unwrap_or(u32::MAX);
                self.collective(CollectiveKind::WgmmaWait(pending), None);
            }
            "mma_async" if op.has("sp") => {
                return Err(self.unsupported("sparse products are not simulated; dense ones are"));
            }
            "mma_async" => self.mma_async(op, operands)?,
            _ => return Err(self.unsupported("this form")),
        }
        Ok(())
    }

    /// `wgmma.mma_async.sync.aligned.shape.d.a.b d, a, b, scale-d[, scale-a, scale-b[, trans-a][, trans-b]]`
    fn mma_async(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let shape = self.shape(op)?;
        let kinds: Vec<&str> = op.parts.iter().copied().filter(|p| super::matrix::is_kind(p)).collect();
        let [d, a, b] = kinds[..] else { return Err(self.unsupported("this form")) };
        let types = (super::matrix::accumulator(d), super::matrix::element(a), super::matrix::element(b));
        let (Some(d_type), Some(a_type), Some(b_type)) = types else {
            return Err(self.unsupported("these types"));
        };
        let in_registers = matches!(self.at(operands, 1)?, Operand::Vector(_));
        let numbers = operands.get(4..).unwrap_or(&[]).iter().map(|o| match o {
            Operand::Int(v) => Some(*v as i64),
            _ => None,
        });
        let numbers: Vec<i64> = numbers
            .collect::<Option<_>>()
            .ok_or_else(|| self.bad("scales and layouts are numbers".into()))?;
        let is_float = d_type != Accumulator::S32;
        let is_half = matches!(a_type, Element::F16 | Element::Bf16);
        let wanted = match (is_float, is_half, in_registers) {
            (false, ..) => 0,
            (true, false, _) => 2,
            (true, true, true) => 3,
            (true, true, false) => 4,
        };
        if numbers.len() != wanted {
            return Err(
                self.bad(format!("needs {wanted} numbers behind the predicate, has {}", numbers.len()))
            );
        }
        let major = |index: usize| match numbers.get(index) {
            Some(1) => Major::Mn,
            _ => Major::K,
        };
        let (a_major, b_major) = if in_registers { (Major::K, major(2)) } else { (major(2), major(3)) };
        let is_negated = |index: usize| numbers.get(index) == Some(&-1);
        let product = Product::new(shape, d_type, a_type, b_type)
            .ok_or_else(|| self.unsupported("this shape and these types"))?;
        let product = Product {
            a_major,
            b_major,
            is_negative: is_negated(0) != is_negated(1),
            satfinite: op.has("satfinite"),
            ..product
        };
        let a = match in_registers {
            true => LeftOperand::Registers(self.fragment(&operands[1], Type::B32, false)?.into()),
            false => LeftOperand::Descriptor(self.operand(operands, 1, Type::B64)?),
        };
        let b = self.operand(operands, 2, Type::B64)?;
        let scale_d = self.predicate(self.at(operands, 3)?)?;
        let d = self.fragment(&operands[0], Type::B32, true)?;
        let d: Box<[u32]> = d.iter().map(|r| r.index).collect();
        if d.len() != product.d.registers() {
            return Err(self.bad(format!(
                "{} accumulators where {} are needed",
                d.len(),
                product.d.registers()
            )));
        }
        if let LeftOperand::Registers(list) = &a {
            if list.len() != product.a.registers() {
                return Err(self.bad(format!(
                    "{} registers of A where {} are needed",
                    list.len(),
                    product.a.registers()
                )));
            }
            self.watched.extend(list.iter().map(|r| r.index));
        }
        self.watched.extend(d.iter().copied());
        self.collective(CollectiveKind::Wgmma(Box::new(Wgmma { product, d, a, b, scale_d })), None);
        Ok(())
    }

    fn set_registers(&mut self, what: &str, operands: &[Operand]) -> Result<()> {
        let count = match operands {
            [Operand::Int(n)] if (24..=256).contains(n) && n % 8 == 0 => *n as u32,
            _ => return Err(self.bad("takes a multiple of 8 from 24 to 256".into())),
        };
        let claims = match what {
            "inc" => true,
            "dec" => false,
            _ => return Err(self.unsupported("this form")),
        };
        self.collective(CollectiveKind::Registers { claims, count }, None);
        Ok(())
    }

    fn cluster_barrier(&mut self, op: &Opcode<'_>) -> Result<()> {
        let is_wait = op.has("wait");
        if !is_wait && !op.has("arrive") {
            return Err(self.unsupported("this kind of barrier"));
        }
        let barrier = ClusterBarrier { is_wait, orders: !op.has("relaxed"), aligned: op.has("aligned") };
        self.emit(Op::Cluster(barrier), Args::default());
        Ok(())
    }

    fn proxy_fence(&mut self, op: &Opcode<'_>) -> Result<()> {
        if op.parts.iter().any(|p| p.starts_with("tensormap")) {
            // Maps in this machine are read when a copy is issued: there is no copy of them that could be old.
            self.emit(Op::Nop, Args::default());
            return Ok(());
        }
        if !op.has("async") && !op.has("async::generic") && !op.has("alias") {
            return Err(self.unsupported("this proxy"));
        }
        let names = |space: &str| op.parts.iter().any(|p| p.split("::").next() == Some(space));
        let restricted = op.parts.iter().any(|p| p.starts_with("sync_restrict"));
        let (shared, global) = (names("shared") || restricted, names("global"));
        let all = !shared && !global;
        self.emit(Op::ProxyFence { shared: shared || all, global: global || all }, Args::default());
        Ok(())
    }

    /// `mapa{.shared::cluster}.u32/u64 d, a, rank`
    fn mapa(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().unwrap_or(Type::U32);
        let a = self.operand(operands, 1, kind)?.index;
        let b = self.operand(operands, 2, Type::U32)?.index;
        let d = self.destination(self.at(operands, 0)?, kind)?.index;
        let alu: lanes::Alu = match kind.bytes() {
            8 => Box::new(|r, args, mask| {
                let ranks = r.b32[args.b as usize];
                let at = r.b64[args.a as usize];
                let out: [u64; 32] = std::array::from_fn(|l| {
                    let base = at[l] & !u64::from(u32::MAX);
                    base | u64::from(window::in_cluster(at[l] as u32, ranks[l]))
                });
                lanes::blend(&mut r.b64[args.d as usize], &out, mask);
            }),
            _ => lanes::b32_2(window::in_cluster),
        };
        self.emit(Op::Alu(alu), Args { d, a, b, c: 0 });
        Ok(())
    }

    /// `getctarank{.shared::cluster}.u32/u64 d, a`
    fn rank_of(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().unwrap_or(Type::U32);
        let a = self.operand(operands, 1, kind)?;
        let own = self.source(&Operand::Name("%cluster_ctarank".into()), Type::U32)?;
        let d = self.destination(self.at(operands, 0)?, Type::U32)?.index;
        let is_wide = a.bank == Bank::B64;
        let alu: lanes::Alu = Box::new(move |r, args, mask| {
            let own = r.b32[args.b as usize];
            let out: [u32; 32] = std::array::from_fn(|l| {
                let at = if is_wide { r.b64[args.a as usize][l] as u32 } else { r.b32[args.a as usize][l] };
                window::rank(at).unwrap_or(own[l])
            });
            lanes::blend(&mut r.b32[args.d as usize], &out, mask);
        });
        self.emit(Op::Alu(alu), Args { d, a: a.index, b: own, c: 0 });
        Ok(())
    }
}
