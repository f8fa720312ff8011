//! How long the ways of `hopper_fwd` and `hopper_small` to cut a plain problem take, as far as the choice between them asks.
//!
//! A way's time follows from the work of the SM that has most of it: a Q tile costs something by itself and something for each of its
//! KV tiles, more where several CTAs share the SM, and more where its rows see few keys. The costs are least-squares fits to an H200's
//! times of random problems, for head dimensions of 64, 128 and 256 (docs/log/planner.md); other head dimensions take those of the next.

use super::{
    hopper_fwd::Tile,
    look::{Look, PRECISE_KEYS},
};

/// How a problem is cut for the CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// By rows: `hopper_fwd` with this tile.
    Rows(Tile),
    /// Rows by 64 and the keys of each: `hopper_small`.
    Keys(Split),
}

impl Cut {
    /// Whether it is one of the few codes that the problem's head dimension, mask and group have.
    fn has_code(self, look: &Look<'_>) -> bool {
        match self {
            Self::Rows(tile) => tile.has_code(look),
            Self::Keys(split) => {
                // Short causal rows come first there: more than a round of them is not what the fit says.
                let rounds_fit = !(look.narrow() && look.causal())
                    || 4 * u64::from(split.cluster) * look.q_tiles(64) <= 5 * look.sms();
                // Groups are decoded in kinds of their own.
                rounds_fit && (split.cluster * split.warpgroups == 2 || !look.grouped())
            }
        }
    }
}

/// Over what the keys of a Q tile of 64 rows are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// CTAs of a cluster.
    pub(super) cluster: u32,
    /// Warpgroups of each.
    pub(super) warpgroups: u32,
}

/// Microseconds for a Q tile, and for each of its KV tiles.
#[derive(Clone, Copy)]
struct Line {
    tile: f32,
    step: f32,
}

impl Line {
    fn at(self, kv_tiles: f32) -> f32 {
        self.tile + self.step * kv_tiles
    }
}

/// What a cut costs, in microseconds.
struct Cost {
    cut: Cut,
    /// The launch, its first loads and its last stores.
    launch: f32,
    /// A CTA that has its SM for itself.
    alone: Line,
    /// The share of each of the CTAs that fill an SM together.
    together: Line,
    /// What a Q tile takes longer where its rows see few keys: a second PV.
    few_keys: f32,
    /// What weighs the work that is not spread evenly: the last Q tiles of a schedule, or the rounds after a grid's first.
    uneven: f32,
}

const fn cost(cut: Cut, costs: [f32; 7]) -> Cost {
    let [launch, tile, step, tile_together, step_together, few_keys, uneven] = costs;
    let (alone, together) = (Line { tile, step }, Line { tile: tile_together, step: step_together });
    Cost { cut, launch, alone, together, few_keys, uneven }
}

const fn rows(tile: Tile, costs: [f32; 7]) -> Cost {
    cost(Cut::Rows(tile), costs)
}

const fn keys(cluster: u32, warpgroups: u32, costs: [f32; 7]) -> Cost {
    cost(Cut::Keys(Split { cluster, warpgroups }), costs)
}

static NARROW_FULL: [Cost; 6] = [
    rows(Tile::Two, [1.11, 1.59, 1.08, 1.59, 1.08, 0.30, 0.50]),
    rows(Tile::Three, [1.56, 1.90, 1.44, 1.90, 1.44, 0.92, 1.00]),
    rows(Tile::ThreeSmall, [1.51, 0.30, 0.71, 0.54, 0.28, 0.18, 1.33]),
    keys(1, 2, [0.07, 2.04, 1.42, 2.04, 1.42, 0.58, 0.95]),
    keys(2, 1, [0.00, 1.36, 1.04, 1.36, 1.04, 0.70, 1.04]),
    keys(4, 2, [0.09, 3.51, 1.49, 3.51, 1.49, 0.00, 0.92]),
];
static NARROW_CAUSAL: [Cost; 7] = [
    rows(Tile::Two, [1.21, 1.89, 1.06, 1.89, 1.06, 0.02, 0.35]),
    rows(Tile::Three, [1.02, 2.68, 1.35, 2.68, 1.35, 0.00, 0.30]),
    rows(Tile::ThreeSmall, [1.64, 0.30, 0.79, 0.70, 0.28, 0.04, 0.93]),
    keys(1, 2, [0.00, 2.31, 1.23, 2.31, 1.23, 0.57, 0.93]),
    keys(2, 1, [0.00, 1.65, 0.93, 1.65, 0.93, 0.59, 0.99]),
    keys(2, 2, [1.85, 2.21, 0.61, 2.21, 0.61, 0.05, 1.70]),
    keys(4, 1, [1.25, 1.72, 0.40, 1.72, 0.40, 0.00, 1.70]),
];
static WIDE_FULL: [Cost; 6] = [
    rows(Tile::Two, [1.20, 1.90, 1.42, 1.90, 1.42, 1.06, 0.50]),
    rows(Tile::TwoSmall, [0.61, 1.97, 0.75, 1.24, 0.43, 0.34, 1.52]),
    keys(1, 2, [0.00, 2.43, 1.11, 2.43, 1.11, 0.36, 1.05]),
    keys(2, 1, [0.00, 2.10, 0.86, 2.10, 0.86, 0.43, 1.02]),
    keys(4, 1, [0.33, 1.94, 0.82, 1.94, 0.82, 0.69, 1.14]),
    keys(8, 1, [0.15, 3.18, 0.79, 3.18, 0.79, 0.32, 1.05]),
];
static WIDE_CAUSAL: [Cost; 6] = [
    rows(Tile::Two, [1.21, 2.55, 1.32, 2.55, 1.32, 0.00, 0.56]),
    rows(Tile::TwoSmall, [0.00, 2.48, 0.82, 1.40, 0.38, 0.00, 1.66]),
    keys(1, 2, [0.00, 2.98, 0.98, 2.98, 0.98, 0.00, 1.01]),
    keys(2, 1, [0.00, 2.33, 0.80, 2.33, 0.80, 0.12, 1.00]),
    keys(2, 2, [0.00, 3.18, 0.98, 3.18, 0.98, 0.32, 1.00]),
    keys(4, 1, [0.00, 2.51, 0.72, 2.51, 0.72, 0.44, 1.05]),
];
static WIDEST_FULL: [Cost; 5] = [
    rows(Tile::Two, [0.40, 5.34, 1.28, 5.34, 1.28, 0.69, 1.00]),
    keys(1, 2, [0.56, 2.30, 1.99, 2.30, 1.99, 0.49, 1.43]),
    keys(2, 1, [0.00, 2.57, 1.68, 2.57, 1.68, 0.59, 1.06]),
    keys(2, 2, [0.00, 2.22, 2.57, 2.22, 2.57, 1.62, 0.94]),
    keys(8, 1, [0.00, 4.52, 1.56, 4.52, 1.56, 0.05, 0.93]),
];
static WIDEST_CAUSAL: [Cost; 5] = [
    rows(Tile::Two, [0.00, 4.43, 1.23, 4.43, 1.23, 0.14, 0.70]),
    keys(1, 1, [0.00, 3.43, 1.47, 3.43, 1.47, 0.00, 0.59]),
    keys(1, 2, [0.00, 3.65, 1.69, 3.65, 1.69, 0.03, 1.10]),
    keys(2, 1, [0.00, 2.48, 1.50, 2.48, 1.50, 0.21, 1.16]),
    keys(2, 2, [0.00, 3.59, 1.86, 3.59, 1.86, 0.37, 1.11]),
];

/// The costs for a head dimension and mask.
fn costs(look: &Look<'_>) -> &'static [Cost] {
    match (look.widest(), look.causal()) {
        (..=64, false) => &NARROW_FULL,
        (..=64, true) => &NARROW_CAUSAL,
        (65..=128, false) => &WIDE_FULL,
        (65..=128, true) => &WIDE_CAUSAL,
        (_, false) => &WIDEST_FULL,
        (_, true) => &WIDEST_CAUSAL,
    }
}

/// The CTAs of one kind of cut: how many there are, and the KV tiles of the longest and of all on average.
struct Work {
    ctas: u64,
    longest: f32,
    mean: f32,
}

impl Work {
    fn of(look: &Look<'_>, rows: u32, block_n: u32, parts: u32) -> Self {
        /// Q tiles of a head that are looked at, where the mask makes them unequal.
        const SAMPLE: u32 = 64;
        let q_tiles = look.facts.seq_q.div_ceil(rows);
        let visible = |tile: u32| {
            let last_row = i64::from((tile + 1).saturating_mul(rows).min(look.facts.seq_q)) - 1;
            let keys = i64::from(look.facts.seq_kv);
            look.facts.band_hi.map_or(keys, |high| (last_row + i64::from(high) + 1).clamp(0, keys))
        };
        let steps = |tile: u32| (visible(tile) as u32).div_ceil(block_n).div_ceil(parts) as f32;
        let sample = q_tiles.min(SAMPLE);
        // The middle of each of so many equal pieces.
        let at = |i: u32| ((u64::from(2 * i + 1) * u64::from(q_tiles)) / u64::from(2 * sample)) as u32;
        Self {
            ctas: u64::from(q_tiles) * look.heads(),
            longest: steps(q_tiles - 1).max(steps(0)),
            mean: (0..sample).map(|i| steps(at(i))).sum::<f32>() / sample as f32,
        }
    }
}

impl Cost {
    /// The problem's time with this cut.
    fn time(&self, look: &Look<'_>) -> f32 {
        let few = if look.facts.seq_kv < PRECISE_KEYS { self.few_keys } else { 0.0 };
        let sms = look.sms();
        match self.cut {
            Cut::Keys(Split { cluster, warpgroups }) => {
                let block_n = if look.narrow() { 128 } else { 64 };
                let work = Work::of(look, 64, block_n, cluster * warpgroups);
                let rounds = (work.ctas * u64::from(cluster)).div_ceil(sms);
                let more = (rounds - 1) as f32 * (self.alone.at(work.mean) + few);
                self.launch + self.alone.at(work.longest) + few + self.uneven * more
            }
            Cut::Rows(tile) => {
                // The widest heads were measured with 64 keys; more cost as much more.
                let block_n = if look.widest() > 128 { 64 } else { tile.block_n(look) };
                let work = Work::of(look, 64 * tile.consumers() as u32, block_n, 1);
                let at_once = tile.ctas() as u64;
                let alone = self.alone.at(work.longest) + few;
                let share = if at_once == 1 { self.alone } else { self.together }.at(work.mean) + few;
                let busiest = if look.causal() {
                    // The longest first: every SM has the mean, and some a Q tile more.
                    (work.ctas as f32 / sms as f32 + self.uneven) * share
                } else {
                    // Whole rounds of as many as fit at once, and a last one of what is left.
                    let most = work.ctas.div_ceil(sms);
                    let last = most % at_once;
                    ((most - last) as f32 + last as f32 * self.uneven) * share
                };
                self.launch + alone.max(busiest)
            }
        }
    }
}

/// Whether the costs are those of this problem: sizes and a mask that was measured, and nothing else.
fn covers(look: &Look<'_>) -> bool {
    look.is_plain() && (!look.masked() || look.causal())
}

fn fastest(look: &Look<'_>, wanted: impl Fn(Cut) -> bool) -> Option<Cut> {
    let costs = if covers(look) { costs(look) } else { Default::default() };
    let allowed = costs.iter().filter(|cost| cost.cut.has_code(look) && wanted(cost.cut));
    let times = allowed.map(|cost| (cost.cut, cost.time(look)));
    times.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(cut, _)| cut)
}

/// Whether splitting keys is the fastest cut; nothing where the costs do not cover the problem.
pub(super) fn splits_keys(look: &Look<'_>) -> Option<bool> {
    Some(matches!(fastest(look, |_| true)?, Cut::Keys(_)))
}

/// `hopper_fwd`'s fastest tile.
pub(super) fn tile(look: &Look<'_>) -> Option<Tile> {
    match fastest(look, |cut| matches!(cut, Cut::Rows(_)))? {
        Cut::Rows(tile) => Some(tile),
        Cut::Keys(_) => None,
    }
}

/// `hopper_small`'s fastest split.
pub(super) fn split(look: &Look<'_>) -> Option<Split> {
    match fastest(look, |cut| matches!(cut, Cut::Keys(_)))? {
        Cut::Keys(split) => Some(split),
        Cut::Rows(_) => None,
    }
}
