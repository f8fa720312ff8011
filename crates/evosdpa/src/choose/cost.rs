//! A cost model: the estimated time of each cut of a plain problem by `hopper_fwd` and `hopper_small`.
//!
//! The time of a cut follows from the work of the SM that has most of it: a Q tile costs something by itself and something for each of its
//! KV tiles, more where several CTAs share the SM, and more where its rows see few keys. The costs are least-squares fits to an H200's
//! times of random problems, for head dimensions of 64, 128 and 256 (docs/log/planner.md); other head dimensions take those of the next.

use evosdpa_core::DType;

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

/// Over what the keys of a Q tile of 64 rows are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// CTAs of a cluster.
    pub(super) cluster: u32,
    /// Warpgroups of each.
    pub(super) warpgroups: u32,
}

impl Split {
    /// Over nothing: one warpgroup has all keys.
    pub(super) const NONE: Self = Self { cluster: 1, warpgroups: 1 };

    /// Whether the split is one of the few codes that the problem's head dimension, mask and group have.
    fn has_code(self, look: &Look<'_>) -> bool {
        match (self.cluster, self.warpgroups) {
            (1, 1) if one_tile_each(look) => !look.narrow() || look.masked() || look.grouped(),
            (1, 1) => look.masked() && look.widest() > 128,
            (2, 1) => true,
            _ if look.grouped() => false,
            (1, 2) => true,
            (2, 2) => !look.narrow() || look.masked(),
            (4, 1) => !look.narrow() && look.masked(),
            (4, 2) => true,
            _ => look.widest() > 128,
        }
    }

    /// Keys of a KV tile.
    pub(super) fn block_n(look: &Look<'_>) -> u32 {
        if look.narrow() { 128 } else { 64 }
    }
}

/// Whether every Q tile of 64 rows has an SM for itself and a single KV tile.
pub(super) fn one_tile_each(look: &Look<'_>) -> bool {
    look.facts.seq_kv <= Split::block_n(look) && look.q_tiles(64) <= look.sms()
}

/// SMs that clusters of this size can take: a cluster does not span the parts of the GPU that SMs come in, of 16 and 18 on an H200,
/// and 120 of 132 are what clusters of four were measured to take at once, 112 of those of eight.
fn sms_of_clusters(look: &Look<'_>, cluster: u32) -> u64 {
    match cluster {
        ..=2 => look.sms(),
        3..=4 => (look.sms() * 10 / 11).max(1),
        _ => (look.sms() * 28 / 33).max(1),
    }
}

/// Which problems a cost is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    All,
    /// A KV tile for each Q tile, and an SM.
    OneTile,
    /// An SM for each Q tile of 64 rows.
    OneRound,
    /// More Q tiles of 64 rows than SMs.
    Rounds,
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
    of: Of,
    /// The launch, its first loads and its last stores.
    launch: f32,
    /// What these take longer when all SMs are in use.
    crowd: f32,
    /// A CTA that has its SM for itself.
    alone: Line,
    /// The share of each of the CTAs that fill an SM together; `None` where only one fits.
    together: Option<Line>,
    /// A Q tile without a loop: two KV tiles for each part at most.
    straight: Option<f32>,
    /// What a Q tile takes longer where its rows see few keys: a second PV.
    few_keys: f32,
    /// What weighs the work that is not spread evenly: the last Q tiles of a schedule, or the rounds after a grid's first.
    uneven: f32,
}

const fn rows(tile: Tile, costs: [f32; 6]) -> Cost {
    let [launch, crowd, tile_alone, step, few_keys, uneven] = costs;
    let alone = Line { tile: tile_alone, step };
    let (cut, together, straight) = (Cut::Rows(tile), None, None);
    Cost { cut, of: Of::All, launch, crowd, alone, together, straight, few_keys, uneven }
}

const fn shared(cut: Cut, of: Of, costs: [f32; 8]) -> Cost {
    let [launch, crowd, tile, step, tile_together, step_together, few_keys, uneven] = costs;
    let (alone, together) = (Line { tile, step }, Some(Line { tile: tile_together, step: step_together }));
    Cost { cut, of, launch, crowd, alone, together, straight: None, few_keys, uneven }
}

const fn rows_shared(tile: Tile, costs: [f32; 8]) -> Cost {
    shared(Cut::Rows(tile), Of::All, costs)
}

const fn keys_shared(costs: [f32; 8]) -> Cost {
    shared(Cut::Keys(Split::NONE), Of::Rounds, costs)
}

const fn keys(cluster: u32, warpgroups: u32, costs: [f32; 7]) -> Cost {
    let [launch, crowd, tile, step, straight, few_keys, uneven] = costs;
    let (cut, alone) = (Cut::Keys(Split { cluster, warpgroups }), Line { tile, step });
    Cost {
        cut,
        of: Of::All,
        launch,
        crowd,
        alone,
        together: None,
        straight: Some(straight),
        few_keys,
        uneven,
    }
}

const fn one_round(costs: [f32; 6]) -> Cost {
    let [launch, crowd, tile, step, few_keys, uneven] = costs;
    let (cut, alone) = (Cut::Keys(Split::NONE), Line { tile, step });
    Cost { cut, of: Of::OneRound, launch, crowd, alone, together: None, straight: None, few_keys, uneven }
}

const fn one_tile(costs: [f32; 4]) -> Cost {
    let [launch, crowd, tile, few_keys] = costs;
    let (cut, alone) = (Cut::Keys(Split::NONE), Line { tile, step: 0.0 });
    Cost { cut, of: Of::OneTile, launch, crowd, alone, together: None, straight: None, few_keys, uneven: 0.0 }
}

static NARROW_FULL: [Cost; 10] = [
    rows(Tile::Two, [0.90, 0.78, 1.46, 1.08, 0.40, 0.90]),
    rows(Tile::Three, [0.95, 1.50, 1.60, 1.44, 1.08, 0.90]),
    rows(Tile::Four, [1.49, 1.50, 1.11, 1.03, 1.16, 0.50]),
    rows_shared(Tile::ThreeSmall, [0.46, 1.38, 1.12, 0.63, 0.45, 0.29, 0.20, 1.30]),
    one_tile([0.23, 0.19, 2.06, 0.53]),
    keys_shared([0.00, 1.14, 1.24, 1.28, 1.33, 0.91, 0.45, 0.70]),
    keys(1, 2, [0.04, 0.72, 1.64, 1.43, 3.93, 0.00, 0.94]),
    keys(2, 1, [0.00, 0.64, 1.72, 0.99, 2.92, 0.00, 1.06]),
    keys(2, 2, [0.00, 1.14, 2.03, 1.35, 4.31, 0.00, 1.08]),
    keys(4, 2, [0.00, 0.42, 4.27, 1.26, 4.98, 0.00, 0.96]),
];
static NARROW_CAUSAL: [Cost; 9] = [
    rows(Tile::Two, [0.81, 0.90, 1.65, 1.06, 0.39, 0.28]),
    rows(Tile::Three, [0.55, 1.00, 2.59, 1.36, 0.43, 0.21]),
    rows_shared(Tile::ThreeSmall, [0.00, 1.47, 1.51, 0.73, 0.62, 0.28, 0.19, 0.80]),
    one_tile([0.32, 0.61, 1.74, 0.45]),
    keys_shared([0.00, 1.50, 1.02, 1.21, 2.37, 3.00, 0.81, 0.30]),
    keys(1, 2, [1.28, 0.40, 1.34, 1.27, 2.68, 0.00, 1.20]),
    keys(2, 1, [0.67, 0.64, 1.09, 1.03, 2.21, 0.00, 1.01]),
    keys(2, 2, [0.55, 0.90, 1.93, 1.37, 3.81, 0.00, 1.02]),
    keys(4, 1, [0.21, 0.74, 2.55, 0.75, 2.93, 0.00, 0.65]),
];
static WIDE_FULL: [Cost; 8] = [
    rows(Tile::Two, [0.98, 1.50, 1.45, 1.42, 1.37, 0.50]),
    rows_shared(Tile::TwoSmall, [0.00, 1.50, 1.92, 0.73, 0.95, 0.44, 0.36, 1.73]),
    one_tile([0.48, 0.63, 1.28, 0.58]),
    keys(1, 2, [0.00, 0.43, 2.38, 1.10, 3.47, 0.28, 1.03]),
    keys(2, 1, [0.00, 0.59, 1.96, 0.83, 2.73, 0.34, 1.04]),
    keys(2, 2, [0.00, 0.68, 2.66, 1.08, 4.29, 0.00, 1.07]),
    keys(4, 1, [0.32, 0.65, 1.89, 0.77, 3.06, 0.00, 1.07]),
    keys(8, 1, [0.00, 0.65, 2.05, 0.93, 3.96, 0.00, 0.91]),
];
static WIDE_CAUSAL: [Cost; 8] = [
    rows(Tile::Two, [0.53, 1.50, 2.06, 1.38, 0.69, 0.35]),
    rows_shared(Tile::TwoSmall, [0.00, 1.42, 2.00, 0.79, 0.98, 0.43, 0.29, 0.94]),
    one_tile([0.12, 1.50, 1.56, 0.45]),
    keys(1, 2, [0.75, 0.31, 1.51, 1.11, 2.59, 0.44, 1.09]),
    keys(2, 1, [0.57, 0.65, 1.22, 0.91, 1.86, 0.53, 0.92]),
    keys(2, 2, [0.25, 0.73, 2.23, 1.21, 3.93, 0.00, 0.85]),
    keys(4, 1, [0.33, 0.93, 1.81, 0.86, 2.86, 0.05, 0.66]),
    keys(8, 1, [0.48, 0.79, 2.67, 0.73, 3.41, 0.00, 0.57]),
];
static WIDEST_FULL: [Cost; 9] = [
    rows(Tile::Two, [0.30, 1.50, 4.61, 1.24, 0.93, 0.50]),
    one_tile([0.42, 0.48, 2.66, 0.62]),
    one_round([0.00, 0.48, 0.10, 1.80, 1.84, 1.50]),
    keys_shared([0.60, 1.38, 1.57, 1.77, 1.88, 1.17, 0.28, 1.09]),
    keys(1, 2, [0.00, 1.08, 1.91, 2.05, 1.80, 1.00, 1.26]),
    keys(2, 1, [0.00, 0.98, 2.07, 1.64, 1.80, 0.47, 1.15]),
    keys(2, 2, [0.00, 0.91, 3.16, 2.08, 1.50, 0.60, 1.00]),
    keys(4, 1, [0.00, 1.26, 2.39, 1.70, 1.50, 0.70, 0.95]),
    keys(8, 1, [0.00, 1.47, 3.08, 1.97, 1.50, 0.61, 0.74]),
];
static WIDEST_CAUSAL: [Cost; 8] = [
    rows(Tile::Two, [0.00, 1.50, 3.76, 1.21, 0.40, 0.70]),
    one_tile([1.23, 0.00, 2.00, 0.43]),
    one_round([0.00, 0.00, 0.10, 1.88, 1.80, 1.37]),
    keys_shared([0.73, 1.48, 1.32, 1.70, 1.39, 1.56, 0.34, 1.02]),
    keys(1, 2, [0.00, 1.08, 2.14, 1.95, 1.50, 0.96, 1.10]),
    keys(2, 1, [0.00, 0.95, 1.51, 1.72, 1.50, 0.85, 0.90]),
    keys(2, 2, [0.00, 0.71, 2.66, 2.04, 1.50, 0.97, 0.91]),
    keys(4, 1, [0.01, 1.50, 2.43, 1.64, 1.50, 0.62, 0.67]),
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

/// The CTAs of one kind of cut: how many there are, the KV tiles of the longest and of all on average, and whether rows of the longest,
/// and the share of all, that see few keys.
struct Work {
    ctas: u64,
    longest: f32,
    mean: f32,
    few_in_longest: bool,
    few: f32,
}

impl Work {
    fn of(look: &Look<'_>, rows: u32, block_n: u32, parts: u32) -> Self {
        /// Q tiles of a head that are looked at, where the mask makes them unequal.
        const SAMPLE: u32 = 64;
        let q_tiles = look.facts.seq_q.div_ceil(rows);
        let seen_by = |row: u64| {
            let keys = i64::from(look.facts.seq_kv);
            look.facts.band_hi.map_or(keys, |high| (row as i64 + i64::from(high) + 1).clamp(0, keys))
        };
        let first_row = |tile: u32| u64::from(tile) * u64::from(rows);
        let last_row = |tile: u32| (first_row(tile) + u64::from(rows)).min(u64::from(look.facts.seq_q)) - 1;
        let steps = |tile: u32| (seen_by(last_row(tile)) as u32).div_ceil(block_n).div_ceil(parts) as f32;
        // f16 keeps P to enough bits.
        let bf16 = look.facts.dtype == DType::BF16;
        let few = |tile: u32| bf16 && seen_by(first_row(tile)) < i64::from(PRECISE_KEYS);
        let sample = q_tiles.min(SAMPLE);
        // The middle of each of so many equal pieces.
        let at = |i: u32| ((u64::from(2 * i + 1) * u64::from(q_tiles)) / u64::from(2 * sample)) as u32;
        let tiles = (0..sample).map(at);
        Self {
            ctas: u64::from(q_tiles) * look.heads(),
            longest: steps(q_tiles - 1).max(steps(0)),
            mean: tiles.clone().map(steps).sum::<f32>() / sample as f32,
            few_in_longest: few(q_tiles - 1),
            few: tiles.filter(|tile| few(*tile)).count() as f32 / sample as f32,
        }
    }
}

impl Cost {
    /// Whether it says something of this problem, and the cut is one of the few codes that the problem's head dimension, mask and group
    /// have.
    fn applies(&self, look: &Look<'_>) -> bool {
        let one_round = look.q_tiles(64) <= look.sms();
        let of = match self.of {
            Of::All => true,
            Of::OneTile => one_tile_each(look),
            Of::OneRound => one_round,
            Of::Rounds => !one_round,
        };
        let has_code = match self.cut {
            Cut::Rows(tile) => tile.has_code(look),
            Cut::Keys(split) => split.has_code(look),
        };
        of && has_code
    }

    /// The problem's time with this cut.
    fn time(&self, look: &Look<'_>) -> f32 {
        match self.cut {
            Cut::Keys(split) => self.time_of_keys(look, split),
            Cut::Rows(tile) => self.time_of_rows(look, tile),
        }
    }

    fn launch(&self, ctas: u64, sms: u64) -> f32 {
        self.launch + self.crowd * (ctas as f32 / sms as f32).min(1.0)
    }

    fn time_of_keys(&self, look: &Look<'_>, split: Split) -> f32 {
        let work = Work::of(look, 64, Split::block_n(look), split.cluster * split.warpgroups);
        let (ctas, sms) = (work.ctas * u64::from(split.cluster), sms_of_clusters(look, split.cluster));
        let rounds = ctas.div_ceil(sms);
        let launch = self.launch(ctas, sms);
        // Wider heads have no second stage, and rows that see few keys no straight code for two KV tiles.
        let most = if work.few_in_longest { 1.0 } else { 2.0 };
        let straight = self.straight.filter(|_| look.widest() <= 128 && work.longest <= most);
        let few = if work.few_in_longest { self.few_keys } else { 0.0 };
        let first = straight.unwrap_or(self.alone.at(work.longest)) + few;
        let line = self.together.unwrap_or(self.alone);
        let each = straight.unwrap_or(line.at(work.mean)) + self.few_keys * work.few;
        if self.together.is_some() {
            launch + first.max(self.uneven * rounds as f32 * each)
        } else if rounds == 1 {
            launch + first
        } else if look.causal() {
            launch + first.max((ctas as f32 / sms as f32 + self.uneven) * each)
        } else {
            launch + first + self.uneven * (rounds - 1) as f32 * each
        }
    }

    fn time_of_rows(&self, look: &Look<'_>, tile: Tile) -> f32 {
        // The widest heads were measured with 64 keys; more cost as much more.
        let block_n = if look.widest() > 128 { 64 } else { tile.block_n(look) };
        let work = Work::of(look, 64 * tile.consumers() as u32, block_n, 1);
        let (sms, at_once) = (look.sms(), tile.ctas() as u64);
        let few = if work.few_in_longest { self.few_keys } else { 0.0 };
        let alone = self.alone.at(work.longest) + few;
        let share = self.together.unwrap_or(self.alone).at(work.mean) + self.few_keys * work.few;
        let busiest = if look.causal() {
            // The longest first: every SM has the mean, and some a Q tile more.
            (work.ctas as f32 / sms as f32 + self.uneven) * share
        } else {
            // Whole rounds of as many as fit at once, and a last one of what is left.
            let most = work.ctas.div_ceil(sms);
            let last = most % at_once;
            ((most - last) as f32 + last as f32 * self.uneven) * share
        };
        self.launch(work.ctas, sms) + alone.max(busiest)
    }
}

/// Whether the costs are those of this problem: sizes and a mask that was measured, and nothing else.
fn covers(look: &Look<'_>) -> bool {
    look.is_plain() && (!look.masked() || look.causal())
}

fn fastest(look: &Look<'_>, wanted: impl Fn(Cut) -> bool) -> Option<Cut> {
    let costs = if covers(look) { costs(look) } else { Default::default() };
    let allowed = costs.iter().filter(|cost| cost.applies(look) && wanted(cost.cut));
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
