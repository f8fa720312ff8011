//! `ldmatrix` and its kin, and `wgmma` descriptors.

use crate::tensor::transfer::*;
use crate::tensor::wgmma::{Descriptor, Major, Swizzle};

fn numbered() -> Matrix {
    std::array::from_fn(|row| std::array::from_fn(|col| (row * 16 + col) as u16))
}

#[test]
fn ldmatrix_gives_each_lane_its_pair() {
    let matrix = numbered();
    let plain = distribute(&matrix, false);
    let transposed = distribute(&matrix, true);
    // Figure 104: thread 0 has the first two of row 0, thread 5 the second two of row 1.
    assert_eq!(plain[0], 0x0001_0000);
    assert_eq!(plain[5], 0x0013_0012);
    assert_eq!(plain[31], 0x0077_0076);
    assert_eq!(transposed[0], 0x0010_0000);
    assert_eq!(transposed[5], 0x0031_0021);
    assert_eq!(transposed[31], 0x0077_0067);
    for lanes_transposed in [false, true] {
        assert_eq!(collect(&distribute(&matrix, lanes_transposed), lanes_transposed), matrix);
    }
    assert_eq!(transpose(&plain), transposed);
    assert_eq!(transpose(&transposed), plain);
    assert_eq!((address_lane(0, 7), address_lane(3, 0)), (7, 24));
}

#[test]
fn ldmatrix_feeds_mma() {
    use crate::tensor::mma::Mma;
    use crate::tensor::{Accumulator, Element, Shape};
    // The four quarters of a 16 by 16 A, top left, bottom left, top right, bottom right, are its registers.
    let mma = Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32);
    let product = mma.contraction().expect("documented");
    let code = |row: usize, col: usize| (row * 16 + col) as u64;
    let a = super::filled(product.a(), code);
    for (register, (top, left)) in [(0, 0), (8, 0), (0, 8), (8, 8)].into_iter().enumerate() {
        let quarter: Matrix =
            std::array::from_fn(|row| std::array::from_fn(|col| code(top + row, left + col) as u16));
        assert_eq!(distribute(&quarter, false), a[register]);
    }
    // A row-major B (k by n) goes through .trans.
    let b = super::filled(product.b(), code);
    for (register, top) in [0, 8].into_iter().enumerate() {
        let half: Matrix = std::array::from_fn(|row| std::array::from_fn(|col| code(top + row, col) as u16));
        assert_eq!(distribute(&half, true), b[register]);
    }
}

#[test]
fn rows_pack_in_memory_order() {
    let row = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(row_to_words(row), [0x0002_0001, 0x0004_0003, 0x0006_0005, 0x0008_0007]);
    assert_eq!(row_from_words(row_to_words(row)), row);
}

#[test]
fn descriptors_decode_their_fields() {
    let bits = 0x0123 | 16 << 16 | 64 << 32 | 5 << 49 | 1 << 62;
    let descriptor = Descriptor::decode(bits);
    let want = Descriptor {
        start_bytes: 0x1230,
        leading_bytes: 256,
        stride_bytes: 1024,
        base_offset: 5,
        swizzle: Swizzle::Bytes128,
    };
    assert_eq!(descriptor, want);
    let modes = [Swizzle::None, Swizzle::Bytes128, Swizzle::Bytes64, Swizzle::Bytes32];
    for (code, mode) in modes.into_iter().enumerate() {
        assert_eq!(Descriptor::decode((code as u64) << 62).swizzle, mode);
    }
}

/// `Σ coordinate·stride` of a CuTe layout with one nested level, in elements.
fn cute(mut index: usize, modes: &[(usize, usize)]) -> usize {
    let mut offset = 0;
    for &(extent, stride) in modes {
        offset += index % extent * stride;
        index /= extent;
    }
    offset
}

/// CuTe's `Swizzle<bits, 4, 3>` on byte addresses.
fn cute_swizzle(address: usize, bits: u32) -> usize {
    let mask = ((1 << bits) - 1) << 7;
    address ^ ((address & mask) >> 3)
}

#[test]
fn addresses_match_the_layouts_given_as_examples() {
    // (major, swizzle, bits, element bytes, LBO, SBO in elements, row modes, column modes):
    // the examples of section 9.7.15.5.1.2.1.3 of the PTX ISA.
    type Example<'a> = (Major, Swizzle, u32, usize, usize, usize, &'a [(usize, usize)], &'a [(usize, usize)]);
    let examples: [Example<'_>; 5] = [
        (Major::K, Swizzle::None, 0, 4, 64, 32, &[(8, 4), (2, 32)], &[(4, 1), (4, 64)]),
        (Major::K, Swizzle::Bytes32, 1, 4, 0, 64, &[(8, 8), (2, 64)], &[(4, 1), (2, 4)]),
        (Major::Mn, Swizzle::None, 0, 2, 128, 64, &[(8, 1), (1, 8), (2, 64)], &[(8, 8), (2, 128)]),
        (Major::Mn, Swizzle::Bytes32, 1, 2, 128, 256, &[(8, 1), (2, 8), (2, 128)], &[(8, 16), (2, 256)]),
        (Major::Mn, Swizzle::Bytes64, 2, 2, 256, 512, &[(8, 1), (4, 8), (2, 256)], &[(8, 32), (2, 512)]),
    ];
    for (major, swizzle, bits, bytes, leading, stride, mn_modes, k_modes) in examples {
        let descriptor = Descriptor {
            start_bytes: 2048,
            leading_bytes: leading * bytes,
            stride_bytes: stride * bytes,
            base_offset: 0,
            swizzle,
        };
        let extent = |modes: &[(usize, usize)]| modes.iter().map(|&(extent, _)| extent).product::<usize>();
        for mn in 0..extent(mn_modes) {
            for k in 0..extent(k_modes) {
                let plain = 2048 + (cute(mn, mn_modes) + cute(k, k_modes)) * bytes;
                let got = descriptor.address(major, mn, k, bytes);
                assert_eq!(got, cute_swizzle(plain, bits), "{major:?} {swizzle:?} mn {mn} k {k}");
            }
        }
    }
}

#[test]
fn a_swizzled_tile_is_a_permutation_and_base_offset_shifts_it() {
    for swizzle in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128] {
        let mut seen = [false; 64];
        for piece in 0..64 {
            let address = swizzle.apply(piece * 16);
            assert!(address.is_multiple_of(16) && !seen[address / 16]);
            seen[address / 16] = true;
        }
    }
    // Row r of a 128-byte pattern has its 16-byte pieces xored with r.
    let tile = Descriptor {
        start_bytes: 0,
        leading_bytes: 16,
        stride_bytes: 1024,
        base_offset: 0,
        swizzle: Swizzle::Bytes128,
    };
    assert_eq!(tile.address(Major::K, 3, 0, 2), 3 * 128 + (3 << 4));
    // A step of 16 elements along k inside the pattern moves the start by 32 bytes.
    let step = Descriptor { start_bytes: 32, ..tile };
    for row in 0..8 {
        assert_eq!(step.address(Major::K, row, 5, 2), tile.address(Major::K, row, 21, 2));
    }
    // A pattern that starts at row 2 of a 1024-byte line.
    let shifted = Descriptor { start_bytes: 256, base_offset: 2, ..tile };
    assert_eq!(shifted.address(Major::K, 3, 0, 2), 256 + tile.address(Major::K, 3, 0, 2));
}
