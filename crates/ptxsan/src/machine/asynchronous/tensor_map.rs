//! Tensor maps: what a tensor copy knows of its tensor.
//!
//! The driver's 128 bytes are its own secret; this machine has an encoding of its own, which [`TensorMap::encode`] writes and
//! `cp.async.bulk.tensor` reads:
//!
//! | bytes | what |
//! |---|---|
//! | 0–3 | `PXTM` |
//! | 4, 5, 6, 7 | rank; element type; swizzle; 1: NaN outside |
//! | 8–15 | address |
//! | 16–35 | sizes less one, 32 bits each, innermost first |
//! | 36–67 | strides in bytes of the dimensions from the second on, 64 bits each |
//! | 68–77 | sizes of a box, 16 bits each |
//! | 78–82 | steps between elements |

use crate::error::{Error, Result};
use crate::tensor::wgmma::Swizzle;

const MAGIC: [u8; 4] = *b"PXTM";
/// The bytes of an encoded map.
pub(crate) const MAP_BYTES: u32 = 128;

/// The type of a tensor's elements, numbered as `CUtensorMapDataType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum TensorElement {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F64,
    Bf16,
    F32Ftz,
    Tf32,
    Tf32Ftz,
}

impl TensorElement {
    /// All of them, by number.
    pub const ALL: [TensorElement; 13] = [
        TensorElement::U8,
        TensorElement::U16,
        TensorElement::U32,
        TensorElement::S32,
        TensorElement::U64,
        TensorElement::S64,
        TensorElement::F16,
        TensorElement::F32,
        TensorElement::F64,
        TensorElement::Bf16,
        TensorElement::F32Ftz,
        TensorElement::Tf32,
        TensorElement::Tf32Ftz,
    ];

    /// Bytes of one element.
    pub fn bytes(self) -> u32 {
        use TensorElement::{Bf16, F16, F64, S64, U8, U16, U64};
        match self {
            U8 => 1,
            U16 | F16 | Bf16 => 2,
            U64 | S64 | F64 => 8,
            _ => 4,
        }
    }

    /// The PTX type that reductions compute in.
    pub(super) fn kind(self) -> crate::parse::ast::Type {
        use crate::parse::ast::Type;
        match self {
            TensorElement::U8 => Type::U8,
            TensorElement::U16 => Type::U16,
            TensorElement::U32 => Type::U32,
            TensorElement::S32 => Type::S32,
            TensorElement::U64 => Type::U64,
            TensorElement::S64 => Type::S64,
            TensorElement::F16 => Type::F16,
            TensorElement::Bf16 => Type::Bf16,
            TensorElement::F64 => Type::F64,
            _ => Type::F32,
        }
    }
}

/// A tensor as bulk tensor copies see it; dimensions innermost first, as `cuTensorMapEncodeTiled` takes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMap {
    /// The address of its first element.
    pub address: u64,
    /// The type of its elements.
    pub element: TensorElement,
    /// 1 to 5 sizes.
    pub sizes: Vec<u64>,
    /// Bytes between neighbours of each dimension but the innermost.
    pub strides_bytes: Vec<u64>,
    /// The sizes of a box.
    pub box_sizes: Vec<u32>,
    /// Steps between the elements of a box.
    pub element_strides: Vec<u32>,
    /// How a box is permuted in shared memory.
    pub swizzle: Swizzle,
    /// What lies outside is NaN instead of zero.
    pub is_nan_outside: bool,
}

/// A row of a box: neighbours along the innermost dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Where it starts within the box in shared memory, before swizzling.
    pub(super) offset: u32,
    /// Where the part inside the tensor lies, and which bytes of the row it is; empty where none is.
    pub(super) global: u64,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl TensorMap {
    /// The bytes to pass as a kernel's argument.
    pub fn encode(&self) -> Result<[u8; 128]> {
        self.check().map_err(Error::TensorMap)?;
        let mut raw = [0u8; 128];
        raw[..4].copy_from_slice(&MAGIC);
        raw[4] = self.sizes.len() as u8;
        raw[5] = self.element as u8;
        raw[6] = self.swizzle as u8;
        raw[7] = u8::from(self.is_nan_outside);
        raw[8..16].copy_from_slice(&self.address.to_le_bytes());
        let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
        for (i, size) in self.sizes.iter().enumerate() {
            put(16 + 4 * i, &((size - 1) as u32).to_le_bytes());
        }
        for (i, stride) in self.strides_bytes.iter().enumerate() {
            put(36 + 8 * i, &stride.to_le_bytes());
        }
        for (i, (size, step)) in self.box_sizes.iter().zip(&self.element_strides).enumerate() {
            put(68 + 2 * i, &(*size as u16).to_le_bytes());
            put(78 + i, &[*step as u8]);
        }
        Ok(raw)
    }

    /// The driver's rules.
    fn check(&self) -> std::result::Result<(), String> {
        let rank = self.sizes.len();
        let bytes = u64::from(self.element.bytes());
        if !(1..=5).contains(&rank) {
            return Err(format!("{rank} dimensions; 1 to 5 are possible"));
        }
        if self.strides_bytes.len() + 1 != rank
            || self.box_sizes.len() != rank
            || self.element_strides.len() != rank
        {
            return Err(format!("{rank} sizes need {} strides, {rank} box sizes and {rank} steps", rank - 1));
        }
        if !self.address.is_multiple_of(16) {
            return Err(format!("address {:#x} is no multiple of 16", self.address));
        }
        if let Some(size) = self.sizes.iter().find(|s| **s == 0 || **s > 1 << 32) {
            return Err(format!("a size of {size}; 1 to 2^32 are possible"));
        }
        if let Some(stride) = self.strides_bytes.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
            return Err(format!("a stride of {stride} bytes; multiples of 16 below 2^40 are possible"));
        }
        if let Some(size) = self.box_sizes.iter().find(|s| !(1..=256).contains(*s)) {
            return Err(format!("a box size of {size}; 1 to 256 are possible"));
        }
        if let Some(step) = self.element_strides.iter().find(|s| !(1..=8).contains(*s)) {
            return Err(format!("a step of {step} elements; 1 to 8 are possible"));
        }
        let row = u64::from(self.box_sizes[0]) * bytes;
        if !row.is_multiple_of(16) {
            return Err(format!("a box row of {row} bytes is no multiple of 16"));
        }
        let span = self.swizzle.span_bytes() as u64;
        if self.swizzle != Swizzle::None && row > span {
            return Err(format!("a box row of {row} bytes is wider than its swizzle of {span}"));
        }
        Ok(())
    }

    /// Reads what [`TensorMap::encode`] wrote.
    pub(super) fn decode(raw: &[u8]) -> Option<TensorMap> {
        let raw: &[u8; 128] = raw.first_chunk()?;
        if raw[..4] != MAGIC {
            return None;
        }
        let rank = raw[4] as usize;
        let number = |at: usize, bytes: usize| {
            raw[at..at + bytes].iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b))
        };
        let map = TensorMap {
            address: number(8, 8),
            element: *TensorElement::ALL.get(raw[5] as usize)?,
            sizes: (0..rank.min(5)).map(|i| number(16 + 4 * i, 4) + 1).collect(),
            strides_bytes: (1..rank.min(5)).map(|i| number(28 + 8 * i, 8)).collect(),
            box_sizes: (0..rank.min(5)).map(|i| number(68 + 2 * i, 2) as u32).collect(),
            element_strides: (0..rank.min(5)).map(|i| number(78 + i, 1) as u32).collect(),
            swizzle: *[Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128]
                .get(raw[6] as usize)?,
            is_nan_outside: raw[7] != 0,
        };
        map.check().is_ok().then_some(map)
    }

    /// Bytes of a row of a box.
    pub(super) fn row_bytes(&self) -> u32 {
        self.box_sizes[0] * self.element.bytes()
    }

    /// Bytes from one row of a box to the next in shared memory: a swizzled one takes its whole span.
    fn pitch(&self) -> u32 {
        if self.swizzle == Swizzle::None { self.row_bytes() } else { self.swizzle.span_bytes() as u32 }
    }

    /// Elements of a box along a dimension.
    fn count(&self, dimension: usize) -> u32 {
        match dimension {
            0 => self.box_sizes[0],
            _ => self.box_sizes[dimension].div_ceil(self.element_strides[dimension]),
        }
    }

    /// Bytes of a box, inside and outside of the tensor.
    pub(super) fn box_bytes(&self) -> u64 {
        (1..self.sizes.len()).map(|d| u64::from(self.count(d))).product::<u64>() * u64::from(self.row_bytes())
    }

    /// Bytes of shared memory from the start of a box to its end.
    pub(super) fn reach_bytes(&self) -> u64 {
        self.box_bytes() / u64::from(self.row_bytes()) * u64::from(self.pitch())
    }

    /// Four bytes of what is read outside the tensor.
    pub(super) fn outside(&self) -> [u8; 4] {
        // What an H200 writes for NaN, whatever the type.
        if self.is_nan_outside { [0xf7, 0x7f, 0xf7, 0x7f] } else { [0; 4] }
    }

    /// The rows of the box at these coordinates.
    pub(super) fn rows(&self, coordinates: &[i32]) -> Vec<Row> {
        let rank = self.sizes.len();
        let (element, pitch) = (u64::from(self.element.bytes()), self.pitch());
        let start = i64::from(coordinates[0]);
        let (low, high) = (start.max(0), (start + i64::from(self.box_sizes[0])).min(self.sizes[0] as i64));
        let rows: u32 = (1..rank).map(|d| self.count(d)).product();
        (0..rows)
            .map(|number| {
                let (mut rest, mut at, mut inside) = (number, self.address, low < high);
                for dimension in 1..rank {
                    let index = rest % self.count(dimension);
                    rest /= self.count(dimension);
                    let place = i64::from(coordinates[dimension])
                        + i64::from(index * self.element_strides[dimension]);
                    inside &= (0..self.sizes[dimension] as i64).contains(&place);
                    at = at.wrapping_add((place as u64).wrapping_mul(self.strides_bytes[dimension - 1]));
                }
                let offset = number * pitch;
                if !inside {
                    return Row { offset, global: 0, from: 0, to: 0 };
                }
                let byte = |column: i64| ((column - start) as u64 * element) as u32;
                let global = at.wrapping_add(low as u64 * element);
                Row { offset, global, from: byte(low), to: byte(high) }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap {
            address: 0x1000,
            element: TensorElement::F16,
            sizes: vec![88, 14],
            strides_bytes: vec![192],
            box_sizes: vec![64, 8],
            element_strides: vec![1, 1],
            swizzle: Swizzle::Bytes128,
            is_nan_outside: false,
        }
    }

    #[test]
    fn what_is_encoded_is_read_back() {
        let map = TensorMap { is_nan_outside: true, ..map() };
        assert_eq!(TensorMap::decode(&map.encode().unwrap()), Some(map.clone()));
        assert_eq!(TensorMap::decode(&[0; 128]), None);
        let mut broken = map.encode().unwrap();
        broken[4] = 9;
        assert_eq!(TensorMap::decode(&broken), None);
    }

    #[test]
    fn rows_end_where_the_tensor_does() {
        let rows = map().rows(&[80, 12]);
        assert_eq!(rows.len(), 8);
        assert_eq!(rows[1], Row { offset: 128, global: 0x1000 + 13 * 192 + 160, from: 0, to: 16 });
        assert_eq!((rows[2].from, rows[2].to), (0, 0), "below the last row");
        let rows = map().rows(&[-8, -1]);
        assert_eq!((rows[0].from, rows[0].to), (0, 0));
        assert_eq!(rows[1], Row { offset: 128, global: 0x1000, from: 16, to: 128 });
    }

    #[test]
    fn the_drivers_rules_are_kept() {
        for (bad, word) in [
            (TensorMap { address: 0x1008, ..map() }, "multiple of 16"),
            (TensorMap { strides_bytes: vec![100], ..map() }, "stride"),
            (TensorMap { box_sizes: vec![128, 8], ..map() }, "wider"),
            (TensorMap { box_sizes: vec![64, 257], ..map() }, "256"),
            (TensorMap { sizes: vec![88], ..map() }, "sizes need"),
        ] {
            let error = bad.encode().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
