//! What can be wrong with a problem or its tensors.

use crate::DType;

/// Why a problem, a shape or a set of tensors was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that is not in its list.
    #[error("unknown {kind} `{name}`{}; allowed: {allowed}", did_you_mean(nearest))]
    UnknownName {
        /// What sort of name it is: dtype, shape, kernel, …
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// The closest known name, when one is close.
        nearest: Option<String>,
        /// The names there are.
        allowed: String,
    },
    /// A part of a list of lengths that says nothing.
    #[error("lengths: `{part}`: {why}")]
    LengthList {
        /// The part.
        part: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Lengths of more or fewer sequences than there are.
    #[error("lengths {lengths} are of {count} sequences, and the problem has {batch}")]
    LengthCount {
        /// The list.
        lengths: String,
        /// How many it names.
        count: usize,
        /// How many there are.
        batch: usize,
    },
    /// A length past the longest.
    #[error("lengths {lengths}: one of {longest} keys, and the problem's longest has {keys}")]
    LengthTooLong {
        /// The list.
        lengths: String,
        /// Its longest.
        longest: usize,
        /// The problem's.
        keys: usize,
    },
    /// Text that is not a shape.
    #[error(
        "cannot read shape `{text}`: {why}; write a name (tiny, mission, small, long, long128) or sizes as \
         b2h8s512d64, with h32/8 for query/key-value heads, s1/8192 for query/key lengths, d192/128 for the \
         value head dimension, and suffixes such as :causal, :window=255/0, :paged=16, :softcap=30 (docs/problems.md has all)"
    )]
    Shape {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A size outside its range.
    #[error("{what} is {value}, but must be {allowed}")]
    Size {
        /// Which size.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The allowed range, in words.
        allowed: &'static str,
    },
    /// Query heads cannot be shared out evenly among key/value heads.
    #[error(
        "{heads_q} query heads cannot share {heads_kv} key/value heads: the first must be a multiple of the second"
    )]
    Heads {
        /// Query heads.
        heads_q: usize,
        /// Key/value heads.
        heads_kv: usize,
    },
    /// The softmax scale is not a finite number.
    #[error("scale is {0}, but must be a finite number")]
    Scale(f32),
    /// A size computation left the range of the machine's integers.
    #[error("the tensors of {problem} would need more than 2^63 bytes; use a smaller problem")]
    Overflow {
        /// The problem, as text.
        problem: String,
    },
    /// More memory than the machine has.
    #[error(
        "{problem} needs {needed_bytes} bytes but only {available_bytes} are available; use a smaller problem"
    )]
    Memory {
        /// The problem, as text.
        problem: String,
        /// What it needs.
        needed_bytes: u64,
        /// What there is.
        available_bytes: u64,
    },
    /// A tensor does not have the shape that the problem says.
    #[error(
        "{tensor} has shape {got:?}, but the problem needs {expected:?} (batch, heads, sequence, head dimension)"
    )]
    TensorShape {
        /// Which tensor.
        tensor: &'static str,
        /// Its shape.
        got: [usize; 4],
        /// What the problem asks for.
        expected: [usize; 4],
    },
    /// A tensor does not have the element type that the problem says.
    #[error(
        "{tensor} holds {got}, but the problem says {expected}; convert the tensor or change the problem"
    )]
    TensorDType {
        /// Which tensor.
        tensor: &'static str,
        /// Its element type.
        got: DType,
        /// What the problem asks for.
        expected: DType,
    },
    /// Strides that reach outside the tensor's memory.
    #[error(
        "shape {shape:?} with strides {strides:?} reaches element {last}, but the buffer holds {len}; \
         pass the whole buffer or fix the strides (in elements)"
    )]
    OutOfBuffer {
        /// The tensor's shape.
        shape: [usize; 4],
        /// Its strides, in elements.
        strides: [usize; 4],
        /// The last element reached (usize::MAX when that overflows).
        last: usize,
        /// Elements in the buffer.
        len: usize,
    },
    /// The innermost dimension is not contiguous.
    #[error(
        "the head dimension has stride {stride}, but must be contiguous (stride 1); copy the tensor first"
    )]
    InnerStride {
        /// The stride, in elements.
        stride: usize,
    },
    /// Two elements of an output share memory.
    #[error(
        "output with shape {shape:?} and strides {strides:?} overlaps itself; give each element its own place"
    )]
    OverlappingOutput {
        /// The tensor's shape.
        shape: [usize; 4],
        /// Its strides, in elements.
        strides: [usize; 4],
    },
    /// The buffer's bytes cannot hold this element type.
    #[error("{len} bytes at this address cannot hold {dtype} elements: length and alignment must be multiples of {}", dtype.bytes())]
    Bytes {
        /// Length of the buffer.
        len: usize,
        /// The element type asked for.
        dtype: DType,
    },
    /// Both packed keys and pages.
    #[error("a paged cache is not packed: write :varlen=q to pack the queries alone, or leave :paged out")]
    PackedPages,
    /// A softcap that is no cap.
    #[error("softcap is {0}, but must be a positive finite number")]
    Softcap(f32),
    /// Scales of tensors that have none.
    #[error(
        "scales per {granularity} need 8-bit codes, but Q holds {q} and K and V hold {kv}; leave :scales out"
    )]
    ScalesWithoutCodes {
        /// What was asked for.
        granularity: crate::Granularity,
        /// Element type of Q.
        q: DType,
        /// Element type of K and V.
        kv: DType,
    },
    /// Data that the problem needs and that was not given.
    #[error("the problem needs {what}; pass them beside Q, K and V")]
    SideMissing {
        /// What is missing.
        what: &'static str,
    },
    /// Data that the problem has no use for.
    #[error(
        "{what} were given, but the problem does not ask for them; leave them out or say so in the problem"
    )]
    SideNotWanted {
        /// What was given.
        what: &'static str,
    },
    /// A list of the wrong length.
    #[error("{what}: {got} values, but the problem needs {expected}")]
    SideLength {
        /// Which list.
        what: &'static str,
        /// Its length.
        got: usize,
        /// What the problem asks for.
        expected: usize,
    },
    /// A bias or mask of the wrong shape.
    #[error(
        "{what} has shape {got:?}, but the problem needs {expected:?} (batch, query heads, queries, keys)"
    )]
    SideShape {
        /// Which tensor.
        what: &'static str,
        /// Its shape.
        got: [usize; 4],
        /// What the problem asks for.
        expected: [usize; 4],
    },
    /// A bias or mask of the wrong type.
    #[error("{what} holds {got}, but must hold {allowed}")]
    SideType {
        /// Which tensor.
        what: &'static str,
        /// Its element type.
        got: DType,
        /// What it may hold.
        allowed: &'static str,
    },
    /// Cumulative lengths that go back, or too far.
    #[error("{what}: value {at} is {value}, but must be {allowed}")]
    CuSeqlens {
        /// Which list.
        what: &'static str,
        /// The index of the value.
        at: usize,
        /// The value.
        value: i32,
        /// The allowed range.
        allowed: String,
    },
    /// More keys or queries used than there is room for, or fewer than none.
    #[error("sequence {sequence} uses {used} {what}, but must use 0 to {capacity}")]
    UsedLength {
        /// Which sequence.
        sequence: usize,
        /// Its length.
        used: i32,
        /// Keys or queries.
        what: &'static str,
        /// What it has room for.
        capacity: usize,
    },
    /// More padding than keys, or less than none.
    #[error(
        "sequence {sequence} has a left padding of {leftpad}, but must have 0 to its {filled} filled keys"
    )]
    LeftPad {
        /// Which sequence.
        sequence: usize,
        /// Its padding.
        leftpad: i32,
        /// Its filled keys, the padding among them.
        filled: usize,
    },
    /// A block of the cache, or a row of the page table, that is not there.
    #[error("sequence {sequence} is at index {index} of a cache with {rows}; use 0 to {}", rows.saturating_sub(1))]
    CacheIndex {
        /// Which sequence.
        sequence: usize,
        /// Its index.
        index: i64,
        /// Blocks of the cache, or rows of the page table.
        rows: usize,
    },
    /// Indices into keys that are not in blocks.
    #[error("packed keys have no blocks to be indexed; leave out :indexed or the packing of keys")]
    PackedIndices,
    /// New tokens that do not fit.
    #[error("sequence {sequence} holds {held} tokens and gets {new} more, but has room for {capacity}")]
    CacheFull {
        /// Which sequence.
        sequence: usize,
        /// Its tokens.
        held: usize,
        /// New ones.
        new: usize,
        /// The most it can hold.
        capacity: usize,
    },
    /// A new token where another sequence has one, old or new.
    #[error(
        "sequences {sequence} and {other} share row {row} of block or page {block}, where the first appends; give each \
         pages of its own"
    )]
    AppendTwice {
        /// Which sequence appends.
        sequence: usize,
        /// Who has the place as well.
        other: usize,
        /// The block or page.
        block: usize,
        /// The row in it.
        row: usize,
    },
    /// A page table that ends too early.
    #[error(
        "the page table has {got} entries with {row_stride} a row, which has none for page {index} of sequence {sequence}"
    )]
    PageTable {
        /// Entries in the table.
        got: usize,
        /// Entries between two rows.
        row_stride: usize,
        /// Which sequence.
        sequence: usize,
        /// Which of its pages.
        index: usize,
    },
    /// A page that is not there.
    #[error("the page table puts page {index} of sequence {sequence} at {page}, but there are {pages} pages")]
    Page {
        /// Which sequence.
        sequence: usize,
        /// Which of its pages.
        index: usize,
        /// The entry.
        page: i32,
        /// Pages in the cache.
        pages: usize,
    },
    /// Positions for another number of sequences.
    #[error("rotary positions: {got} values, but there are {expected} sequences")]
    RotaryFirst {
        /// How many were given.
        got: usize,
        /// Sequences.
        expected: usize,
    },
    /// More to turn than a row has, or nothing.
    #[error("rotary cosines have {columns} columns, but a head dimension of {dim} allows 1 to {}", dim / 2)]
    RotaryDim {
        /// Columns.
        columns: usize,
        /// Head dimension.
        dim: usize,
    },
    /// Codes, which cannot be turned without their scale.
    #[error("rotary embedding of {given}: only f32, f16 and bf16 are turned")]
    RotaryType {
        /// What was given.
        given: DType,
    },
    /// A position without angles.
    #[error(
        "sequence {sequence} has a token at position {position}, but there are angles for {positions} positions"
    )]
    RotaryPosition {
        /// Which sequence.
        sequence: usize,
        /// The position.
        position: i64,
        /// How many there are.
        positions: usize,
    },
    /// The LSE buffer has the wrong length.
    #[error("the LSE buffer holds {got} values, but batch × query heads × queries is {expected}")]
    LseLength {
        /// Values in the buffer.
        got: usize,
        /// Values needed.
        expected: usize,
    },
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default()
}

/// The name closest to `wanted`, when it is close enough to be a slip of the pen.
pub fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let chars = wanted.chars().count();
    let limit = (chars / 3).max(2);
    let lower = wanted.to_lowercase();
    names
        .into_iter()
        // So many characters have to be added or taken away at least: what is much too long is not compared.
        .filter(|name| name.chars().count().abs_diff(chars) <= limit)
        .map(|name| (strsim::levenshtein(&lower, &name.to_lowercase()), name))
        .filter(|(distance, _)| *distance <= limit)
        // Of those that are as near, one of which only the end is missing.
        .min_by_key(|(distance, name)| (*distance, !name.starts_with(wanted), *name))
        .map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_slips_and_ignores_strangers() {
        let names = ["mission", "small", "long", "long128"];
        assert_eq!(nearest("mision", names), Some("mission".into()));
        assert_eq!(nearest("long12", names), Some("long128".into()));
        assert_eq!(nearest("enormous", names), None);
        assert_eq!(nearest("MISSION", names), Some("mission".into()));
        assert_eq!(nearest("sm_90", ["sm_80", "sm_86", "sm_90a"]), Some("sm_90a".into()));
    }

    /// A service answers megabytes of nonsense as fast as anything else.
    #[test]
    fn nearest_does_not_compare_what_is_much_too_long() {
        let (long, began) = ("x".repeat(4 << 20), std::time::Instant::now());
        assert_eq!(nearest(&long, ["mission"; 1000]), None);
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
    }
}
