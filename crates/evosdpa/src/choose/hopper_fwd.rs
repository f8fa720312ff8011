//! Tiles and schedules of `hopper_fwd`. Measured on an H200: docs/log/hopper.md.

use evosdpa_core::Feature;

use super::{cost, look::Look, look::PRECISE_KEYS, settings::Settings};

/// The shape of the work of one CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    /// One warpgroup in each of three CTAs of an SM.
    ThreeSmall,
    /// One warpgroup in each of two CTAs of an SM.
    TwoSmall,
    /// Four warpgroups.
    Four,
    /// Three warpgroups.
    Three,
    /// Two warpgroups.
    Two,
}

impl Tile {
    fn of(look: &Look<'_>) -> Self {
        if look.asks_for(&[Feature::BlockMask]) {
            return if look.in_blocks(128, 64) { Self::Two } else { Self::TwoSmall };
        }
        // Wider heads leave registers for two warpgroups only; lengths and pages take those of the producer, modifiers those
        // of the loop.
        if look.widest() > 128 || !look.is_plain() {
            return Self::Two;
        }
        if let Some(width) = look.window() {
            return Self::of_window(look, width);
        }
        let seq_kv = look.facts.seq_kv;
        let many = look.narrow() && look.q_tiles(192) >= 4 * look.sms();
        if many && !look.masked() && (PRECISE_KEYS..=512).contains(&seq_kv) && seq_kv.is_multiple_of(64) {
            return Self::Four;
        }
        // Pairs of equal length, which the cost knows nothing of; groups have no code for them.
        if one_round(look) && look.facts.seq_q >= 1024 && !look.grouped() {
            return Self::Two;
        }
        // Of so many the rounds are alike, and what counts is the rate.
        if many && !look.masked() && seq_kv >= 1024 {
            return Self::Three;
        }
        if long_for_three(look) || fewer_rounds_of_three(look) {
            return Self::Three;
        }
        cost::tile(look).unwrap_or(Self::Two)
    }

    /// Windows, which no cost covers. Of a narrow one, small tiles leave fewer scores at both edges unused; of a wide one, what counts
    /// is the rate.
    fn of_window(look: &Look<'_>, width: u32) -> Self {
        match look.widest() {
            ..=64 if width > 1024 && look.q_tiles(192) >= 4 * look.sms() => Self::Three,
            ..=64 if width > 1024 => Self::Two,
            ..=64 if look.q_tiles(64) >= 5 * look.sms() => Self::ThreeSmall,
            ..=64 => Self::TwoSmall,
            _ if shared_heads(look) > 1 => Self::Two,
            65..=112 if width < PRECISE_KEYS => Self::TwoSmall,
            113.. if width <= PRECISE_KEYS => Self::TwoSmall,
            _ => Self::Two,
        }
    }

    /// Whether the tile is one of the few codes that the problem's head dimension, mask and group have. Groups are decoded in kinds
    /// of their own, and their heads share larger tiles.
    pub(super) fn has_code(self, look: &Look<'_>) -> bool {
        match self {
            Self::TwoSmall => !look.grouped() && shared_heads(look) == 1,
            Self::ThreeSmall => !look.grouped() || look.masked(),
            // Rows of few keys have one code.
            Self::Three => look.masked() || look.facts.seq_kv >= PRECISE_KEYS,
            Self::Two => {
                !look.narrow() || look.grouped() || look.masked() || look.facts.seq_kv >= PRECISE_KEYS
            }
            Self::Four => {
                !look.masked() && look.facts.seq_kv >= PRECISE_KEYS && look.facts.seq_kv.is_multiple_of(64)
            }
        }
    }

    pub(super) fn consumers(self) -> i64 {
        match self {
            Self::ThreeSmall | Self::TwoSmall => 1,
            Self::Two => 2,
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    /// CTAs of an SM.
    pub(super) fn ctas(self) -> i64 {
        match self {
            Self::ThreeSmall => 3,
            Self::TwoSmall => 2,
            _ => 1,
        }
    }

    /// Keys of a KV tile.
    pub(super) fn block_n(self, look: &Look<'_>) -> u32 {
        match look.widest() {
            _ if matches!(self, Self::ThreeSmall | Self::TwoSmall | Self::Four) => 64,
            _ if look.asks_for(&[Feature::BlockMask]) => {
                if look.widest() <= 128 && look.in_blocks(128, 128) {
                    128
                } else {
                    64
                }
            }
            65..=80 if self == Self::Three => 112,
            81..=128 if self == Self::Three => 96,
            ..=128 => 128,
            // 96 keys beside O of 192 columns fill the registers, 80 beside 256; few keys divide better by 64.
            129..=192
                if look.facts.seq_kv <= 512 || look.window().is_some_and(|width| width < PRECISE_KEYS) =>
            {
                64
            }
            129..=192 => 96,
            // Of a causal mask the last KV tile of a Q tile is half empty, and more so a wider one.
            _ if look.facts.seq_kv <= 512 || look.causal() && look.facts.seq_kv < 1024 => 64,
            _ if !look.is_plain() || look.window().is_some() => 64,
            _ => 80,
        }
    }

    fn why(self, look: &Look<'_>) -> &'static str {
        match self {
            Self::ThreeSmall => {
                "three CTAs of one warpgroup hide each other's latency, and fewer rows and SMs stay empty"
            }
            Self::TwoSmall => {
                "two CTAs of one warpgroup: fewer rows and SMs stay empty than with larger tiles"
            }
            Self::Four => "many rows of few whole KV tiles: four warpgroups hide the start of a Q tile",
            Self::Three if !look.narrow() => {
                "long rows of 65 to 112 columns: three warpgroups share each KV tile, which is fetched less often"
            }
            Self::Three => "head dimensions of 64 are bound by the softmax: three warpgroups overlap it best",
            Self::Two if look.narrow() => {
                "two warpgroups, queries in registers: these rows divide best by 128"
            }
            Self::Two => "two warpgroups: O and the scores of wide heads take 240 registers",
        }
    }
}

/// Heads of more than 64 columns that three warpgroups multiply faster where rows are long: up to 80 columns leave registers for KV tiles
/// of 112 keys, and those of odd rows arrive late.
fn suits_three(look: &Look<'_>) -> bool {
    match look.widest() {
        _ if !look.is_plain() => false,
        65..=80 => true,
        81..=96 => look.causal() || has_odd_rows(look),
        97..=112 => has_odd_rows(look),
        _ => false,
    }
}

/// 72, 88 or 104 columns, where every other row begins within a sector of 32 bytes: TMA fetches them more slowly than two warpgroups
/// multiply.
fn has_odd_rows(look: &Look<'_>) -> bool {
    [look.facts.head_dim, look.facts.value_dim].iter().any(|columns| columns % 16 == 8)
}

/// Whether there are as many and as long rows as that takes: 192 of them divide worse, and more keys of a causal mask's last KV tiles
/// are hidden.
fn long_for_three(look: &Look<'_>) -> bool {
    let (rounds, keys) = match (has_odd_rows(look), look.masked()) {
        (true, false) => (2, 1024),
        (true, true) => (2, 2048),
        (false, false) => (6, 4096),
        (false, true) => (4, 4096),
    };
    suits_three(look) && look.q_tiles(192) >= rounds * look.sms() && look.facts.seq_kv >= keys
}

/// Whether Q tiles of 192 rows, which take up to 1.45 times as long as those of 128, need so many fewer rounds of the SMs.
fn fewer_rounds_of_three(look: &Look<'_>) -> bool {
    let rounds = |rows| look.q_tiles(rows).div_ceil(look.sms());
    suits_three(look)
        && !look.masked()
        && !look.grouped()
        && look.facts.seq_kv >= 1024
        && 29 * rounds(192) < 20 * rounds(128)
}

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let tile = Tile::of(look);
    let keys = i64::from(tile.block_n(look));
    let values = [("CONSUMERS", tile.consumers()), ("BLOCK_N", keys), ("CTAS_PER_SM", tile.ctas())];
    settings.decide("tile", &values, tile.why(look));
    let settles = settles(look, tile);
    schedule(look, tile, settings);
    pipeline(look, tile, settles, settings);
    softmax(settles, settings);
    accumulator(look, tile, settings);
}

/// Which Q tiles a CTA works on, in which order.
fn schedule(look: &Look<'_>, tile: Tile, settings: &mut Settings) {
    let Order { persistent, paired, longest_first, section_mib, pack_heads, why } = Order::of(look, tile);
    settings.decide(
        "schedule",
        &[
            ("PERSISTENT", persistent),
            ("PAIRED", paired),
            ("LONGEST_FIRST", i64::from(longest_first)),
            ("SECTION_MIB", section_mib),
        ],
        why,
    );
    let why = if pack_heads > 1 {
        "query heads of one key head share Q tiles, which leaves fewer rows empty"
    } else {
        "Q tiles of one head each"
    };
    settings.decide("packing", &[("PACK_HEADS", pack_heads)], why);
}

struct Order {
    persistent: i64,
    paired: i64,
    longest_first: bool,
    section_mib: i64,
    pack_heads: i64,
    why: &'static str,
}

impl Order {
    fn of(look: &Look<'_>, tile: Tile) -> Self {
        let dynamic = is_dynamic(look, tile);
        let pack_heads = pack_heads(look, tile);
        let plain = Self {
            persistent: 1,
            paired: 0,
            longest_first: false,
            section_mib: 0,
            pack_heads,
            why: "equal Q tiles: divided up beforehand",
        };
        if look.asks_for(&[Feature::PackedQueries]) {
            let why = "packed sequences: the device counts their Q tiles and hands them out by an atomic counter, longest first";
            return Self { persistent: 2, longest_first: true, section_mib: 32, why, ..plain };
        }
        if look.asks_for(&[Feature::BlockMask]) {
            let why = "Q tiles see as many blocks as only the device knows: an atomic counter hands them out";
            return Self { persistent: 2, longest_first: look.causal(), pack_heads: 1, why, ..plain };
        }
        if look.is_plain()
            && let Some(width) = look.window()
        {
            let why =
                "a window: the same rows of all heads that fit L2, the last first, by an atomic counter";
            // Groups have one code for both.
            let section_mib = if !look.grouped() && window_fits_l2(look, width) { 0 } else { 32 };
            return Self { persistent: 2, longest_first: true, section_mib, why, ..plain };
        }
        if !look.causal() && !dynamic {
            return plain;
        }
        if !look.masked() {
            let why = "equal Q tiles, few for each CTA: an atomic counter evens out the last ones";
            return Self { persistent: 2, why, ..plain };
        }
        if tile == Tile::Two && one_round(look) {
            // 2: the precise ones, which take longer than their KV tiles say, have a shorter partner.
            let why = "pairs of a long and a short Q tile fill the GPU once, all equally long";
            return Self { persistent: 2, paired: 2, pack_heads: 1, why, ..plain };
        }
        let section_mib = section_mib(look, tile, pack_heads);
        let why = if section_mib > 0 {
            "unequal Q tiles: longest first, by an atomic counter, in sections of L2's size"
        } else {
            "unequal Q tiles: longest first of all heads, by an atomic counter"
        };
        Self { persistent: 2, longest_first: true, section_mib, why, ..plain }
    }
}

/// Whether a counter pays: so many Q tiles, unequal or large; tiles that share an SM; or wide heads without a mask, whose last Q tiles
/// it evens out (but for whole KV tiles, which take equally long). Groups of four and eight with the widest heads always use it: their other kinds are taken up by decoding.
fn is_dynamic(look: &Look<'_>, tile: Tile) -> bool {
    let many = (look.masked() || look.widest() > 128) && look.q_tiles(128) >= 4 * look.sms();
    let whole = !look.few_keys() && look.facts.seq_kv.is_multiple_of(128) && !suits_three(look);
    let even = !look.masked() && (65..=128).contains(&look.widest()) && tile == Tile::Two && !whole;
    let four = tile == Tile::Four && !look.facts.seq_kv.is_multiple_of(64);
    many || even || four || tile == Tile::ThreeSmall || look.widest() > 192 && look.grouped()
}

/// Whether pairs of a long and a short Q tile fill the GPU once.
fn one_round(look: &Look<'_>) -> bool {
    let rows = 128;
    let pairs = u64::from(look.facts.seq_q.div_ceil(rows).div_ceil(2)) * look.heads();
    let fills = look.causal()
        && !is_dynamic(look, Tile::Two)
        && look.facts.seq_q <= 16 * rows
        && pairs <= look.sms()
        && 10 * pairs > 9 * look.sms();
    // Of the widest heads, whose code depends on the number of keys, only the lengths that are paired most.
    let lengths = look.widest() <= 192 || (1024..=2048).contains(&look.facts.seq_kv);
    fills && lengths
}

/// Whether the keys and values that a Q tile of every head sees at the same time stay in L2, with room for what else is there.
fn window_fits_l2(look: &Look<'_>, width: u32) -> bool {
    let row_bytes = u64::from(look.facts.head_dim + look.facts.value_dim) * look.facts.dtype.bytes() as u64;
    look.kv_heads() * u64::from(width + 128) * row_bytes <= 40 << 20
}

/// Heads are worked on together while their K and V take this much, where those of all do not stay in L2: half of it where a head's
/// part is short-lived. 0: all at once, because the end of each section leaves SMs idle.
fn section_mib(look: &Look<'_>, tile: Tile, pack_heads: i64) -> i64 {
    let facts = look.facts;
    let row_bytes = u64::from(facts.head_dim + facts.value_dim) * facts.dtype.bytes() as u64;
    let mib = (look.kv_heads() * u64::from(facts.seq_kv) * row_bytes) >> 20;
    // Of 128 columns reading K and V again shows soonest: narrower heads wait for the softmax, wider ones for the MMAs. Small tiles
    // read them most often.
    let past_l2 = match look.widest() {
        65..=128 => mib >= 44,
        _ if tile.ctas() > 1 => mib >= 60,
        _ => mib >= 96,
    };
    // Three warpgroups read K and V again less often, and up to 96 columns sections cost more than they gain.
    if tile == Tile::Three && !look.narrow() {
        return if look.widest() <= 96 { 0 } else { 32 };
    }
    if look.causal() && pack_heads == 1 && !past_l2 {
        return 0;
    }
    let short_lived = look.widest() <= 128 && pack_heads == 1 && (facts.seq_kv <= 512 || mib < 96);
    match tile {
        // Narrow heads have one size of sections for each tile where the mask is causal.
        Tile::Two if look.narrow() && look.causal() => 0,
        Tile::ThreeSmall if look.causal() => 16,
        Tile::Three if look.causal() => 32,
        _ if short_lived || suits_three(look) => 16,
        _ => 32,
    }
}

/// Query heads that share a Q tile, where the tile has code for it.
fn pack_heads(look: &Look<'_>, tile: Tile) -> i64 {
    if tile == Tile::Two { shared_heads(look) } else { 1 }
}

/// As many query heads as divide the group, where sharing Q tiles of 128 rows leaves fewer of them empty.
fn shared_heads(look: &Look<'_>) -> i64 {
    let most: u32 = match look.group() {
        group if group.is_multiple_of(4) => 4,
        group if group.is_multiple_of(2) => 2,
        _ => return 1,
    };
    // Sequences whose lengths no host knows may be short, and to long ones it makes no difference.
    if look.asks_for(&[Feature::PackedQueries]) {
        return i64::from(most);
    }
    // Codes that packing would double are left out: those without a mask, of narrow heads, which have small tiles, and of the widest.
    let has_code = look.masked() && (65..=192).contains(&look.widest());
    // Q tiles that the positions of so many heads take, together or each on its own.
    let (rows, heads, seq_q) = (128, u64::from(most), u64::from(look.facts.seq_q));
    let fewer = (heads * seq_q).div_ceil(rows) < heads * seq_q.div_ceil(rows);
    if has_code && fewer { i64::from(most) } else { 1 }
}

/// What runs under what.
fn pipeline(look: &Look<'_>, tile: Tile, settles: bool, settings: &mut Settings) {
    let wide = look.widest() > 128;
    let softmax_bound = tile == Tile::Three && look.masked() && !(settles && look.narrow());
    // The answer costs a register: three and four warpgroups have none left, nor have the widest heads, nor masks of 128 columns beside
    // maxima.
    let probe = match look.widest() {
        ..=64 => tile.consumers() <= 2,
        65..=127 => tile != Tile::Three,
        128 if settles => true,
        128..=192 => !look.masked(),
        _ => false,
    };
    // Taking turns costs registers too, and modifiers of the widest heads have none for it; a boolean mask alone beside lengths
    // that are data spills without it instead.
    let mask_and_lengths =
        look.own_lengths() && look.asks_for(&[Feature::BooleanMask]) && !look.asks_for(&[Feature::Bias]);
    let turns = match look.widest() {
        193.. if look.modified() && !mask_and_lengths => 0,
        _ if wide || softmax_bound => 1,
        _ => 2,
    };
    let values = [
        ("PINGPONG", turns),
        ("PROBE_AHEAD", i64::from(probe)),
        ("STAGES", if tile == Tile::Four { 4 } else { 2 }),
        ("Q_STAGES", if wide { 1 } else { 2 }),
    ];
    let why = if turns == 0 {
        "modifiers beside O of the widest heads leave no registers for warpgroups that take turns"
    } else if wide {
        "MMA and softmax overlap as far as registers allow; one Q tile fits beside two stages of wide KV tiles"
    } else if softmax_bound {
        "the softmax takes as long as the MMAs: warpgroups take turns inside the loop alone"
    } else {
        "MMA and softmax overlap; warpgroups take turns from the first QKᵀ on, and the next Q tile is loaded ahead"
    };
    settings.decide("pipeline", &values, why);
}

/// Whether rows of which no key holds much are weighed without a maximum, and after how many keys that is first asked.
fn softmax(settles: bool, settings: &mut Settings) {
    let (keys, why) = if settles {
        (
            512,
            "rows of which no key holds a quarter are weighed without a maximum, which the tensor cores would wait for",
        )
    } else {
        (0, "every KV tile has its maximum: its rows are few, its scores modified, or its MMAs take longer")
    };
    settings.decide("softmax", &[("SETTLE_KEYS", keys)], why);
}

/// Whether that pays: rows are long enough to settle early, and CTAs have more than one of them to fetch the longer code for.
fn settles(look: &Look<'_>, tile: Tile) -> bool {
    let facts = look.facts;
    // Rows are read again in whole chunks of eight elements where a weight has overflowed. The widest heads wait for their MMAs.
    let whole_chunks = facts.head_dim.is_multiple_of(8) && facts.value_dim.is_multiple_of(8);
    let has_code = whole_chunks
        && look.widest() <= 128
        && matches!(tile, Tile::Two | Tile::Three)
        && !look.modified()
        && !look.every_row_precise()
        && !look.asks_for(&[Feature::PagedCache, Feature::Chunks, Feature::BlockMask]);
    // Of lengths that no host knows there is only the longest.
    let keys = if look.own_lengths() { 4096 } else { 2048 };
    has_code && look.window().is_none() && facts.seq_kv >= keys && !one_round(look)
}

/// Where Q and O live.
fn accumulator(look: &Look<'_>, tile: Tile, settings: &mut Settings) {
    let widest = look.widest();
    let few_keys = !look.masked() && look.facts.seq_kv <= 512;
    let own_queries = look.asks_for(&[Feature::PackedQueries, Feature::UsedQueries]);
    // A producer that looks pages up has the registers that a Q tile of wide heads would need, and so has what modifies scores.
    let wide = !look.masked() && !look.modified() && !look.asks_for(&[Feature::PagedCache]);
    let in_registers = widest <= 128 && tile == Tile::Two && (look.narrow() || wide);
    settings.decide(
        "registers",
        &[
            ("Q_IN_REGS", i64::from(in_registers)),
            // Of queries that end anywhere, some rows are stored directly whatever the others are, and the widest heads have no
            // room for both codes.
            ("STORE_DIRECT", i64::from(widest > 192 && (!look.causal() || own_queries))),
            ("SCALE_LATE", i64::from(look.facts.value_dim <= 128 || widest > 192 && few_keys)),
        ],
        match (in_registers, widest) {
            (true, _) => "registers are left for the Q tile, so that QKᵀ reads less shared memory",
            (false, ..=192) => "no registers are left for the Q tile",
            (false, _) => "O takes 128 registers: it is stored without a copy where it can be, and rescaled under the next QKᵀ",
        },
    );
}

/// What lengths leave out of the code.
pub(super) fn kinds(look: &Look<'_>, value: &dyn Fn(&str) -> i64, settings: &mut Settings) {
    let (keys, tile) = (i64::from(look.facts.seq_kv), value("BLOCK_N"));
    let few_keys = look.few_keys();
    // CTAs that share an SM have one code, and so has any other length where decoding takes up most of the kinds.
    let small = value("CTAS_PER_SM") > 1;
    // KV tiles of 80 keys are whole by accident.
    // What a block mask leaves is whole where all there is is whole.
    let uncut = if look.asks_for(&[Feature::BlockMask]) { look.sees_all_shown() } else { !few_keys };
    let whole = uncut && keys % tile == 0 && tile != 80 && !small && !suits_three(look);
    let any_length = small || tile != 80 && (look.grouped() || look.widest() > 192);
    let why = match (whole, look.masked()) {
        (true, _) => "whole KV tiles: no masks",
        (false, true) => "code for any mask and any number of keys",
        (false, false) => "code for any number of keys",
    };
    settings.decide("mask code", &[("WHOLE_TILES", i64::from(whole))], why);
    // Wide heads, lengths and pages leave no registers for both codes of a cap or of slopes.
    let asks_device = look.widest() <= 128
        && !look.own_lengths()
        && !look.asks_for(&[Feature::PagedCache, Feature::Chunks, Feature::BlockMask]);
    look.decide_precision(few_keys || !whole && any_length, asks_device, settings);
}
