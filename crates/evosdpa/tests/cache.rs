//! Appending to a cache and rotary embedding, against their definitions in f64.
#![cfg(feature = "cpu")]

use evosdpa::{
    DType, Device, Layout, NewTokens, PageTable, Positions, Rotary, Tensor, TensorView, TensorViewMut, cache,
};

/// A number for each element, none like another.
fn numbers(count: usize, from: f32) -> Vec<f32> {
    (0..count).map(|i| from + (i * 37 % 101) as f32 / 8.0).collect()
}

fn view(data: &[f32], shape: [usize; 4]) -> TensorView<'_> {
    TensorView::from_slice(data, shape, Layout::Bhsd).unwrap()
}

fn view_mut(data: &mut [f32], shape: [usize; 4]) -> TensorViewMut<'_> {
    TensorViewMut::from_slice(data, shape, Layout::Bhsd).unwrap()
}

/// Cosines and sines of `positions`, two columns.
fn angles(positions: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / 2) as f32 * if i.is_multiple_of(2) { 1.0 } else { 0.1 };
    (0..2 * positions).map(|i| (angle(i).cos(), angle(i).sin())).unzip()
}

/// One row turned, in f64.
fn turned(row: &[f32], position: usize, interleaved: bool) -> Vec<f64> {
    let mut row: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    for (i, step) in [1.0f64, 0.1].into_iter().enumerate() {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + 2) };
        let (sin, cos) = (position as f64 * step).sin_cos();
        (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos);
    }
    row
}

fn close(row: &[f32], wanted: &[f64]) {
    for (x, y) in row.iter().zip(wanted) {
        assert!((f64::from(*x) - y).abs() < 1e-5 * (1.0 + y.abs()), "{row:?} {wanted:?}");
    }
}

#[test]
fn pages_get_packed_tokens_turned_and_nothing_else_changes() {
    // Pages of two tokens; sequences hold three and zero, and get one and three more.
    let (shape, new_shape) = ([6, 2, 2, 6], [1, 2, 4, 6]);
    let (k, v) = (numbers(48, 1.0), numbers(48, 100.0));
    let table = [5, 0, -1, 3, 1, 9];
    let tokens = NewTokens {
        lengths: &[3, 0],
        cu_seqlens: Some(&[0, 1, 4]),
        pages: Some((PageTable { entries: &table, row_stride: 3 }, 2)),
        cache_batch_idx: None,
    };
    let (cos, sin) = angles(4);
    for interleaved in [true, false] {
        for first in [None, Some(&[2, 1][..])] {
            let rotary = Rotary { cos: view(&cos, [1, 1, 4, 2]), sin: view(&sin, [1, 1, 4, 2]), interleaved };
            let (mut k_cache, mut v_cache) = (vec![-1.0f32; 144], vec![-1.0f32; 144]);
            cache::append(
                Device::Cpu,
                [view_mut(&mut k_cache, shape), view_mut(&mut v_cache, shape)],
                [view(&k, new_shape), view(&v, new_shape)],
                &tokens,
                Some((rotary, first)),
            )
            .unwrap();
            // (new row, page, row, position in the sequence, sequence, number)
            let moves = [(0, 0, 1, 3, 0, 0), (1, 3, 0, 0, 1, 0), (2, 3, 1, 1, 1, 1), (3, 1, 0, 2, 1, 2)];
            for (new, page, row, position, sequence, number) in moves {
                for head in 0..2 {
                    let (from, to) = ((head * 4 + new) * 6, ((page * 2 + head) * 2 + row) * 6);
                    let position = first.map_or(position, |first| first[sequence] as usize + number);
                    close(&k_cache[to..to + 6], &turned(&k[from..from + 6], position, interleaved));
                    assert_eq!(v_cache[to..to + 6], v[from..from + 6]);
                }
            }
            let written = |cache: &[f32]| cache.iter().filter(|x| **x != -1.0).count();
            assert_eq!((written(&k_cache), written(&v_cache)), (48, 48));
        }
    }
}

#[test]
fn queries_are_turned_at_their_positions() {
    let (x, shape) = (numbers(60, 0.5), [2, 1, 5, 6]);
    let (cos, sin) = angles(9);
    let rotary = Rotary { cos: view(&cos, [1, 1, 9, 2]), sin: view(&sin, [1, 1, 9, 2]), interleaved: false };
    for advance in [true, false] {
        for cu_seqlens in [None, Some(&[0, 3, 9][..])] {
            let shape = if cu_seqlens.is_some() { [1, 1, 10, 6] } else { shape };
            let mut out = vec![-1.0f32; 60];
            let positions = Positions { first: &[4, 0], cu_seqlens, advance };
            cache::rotate(Device::Cpu, view(&x, shape), view_mut(&mut out, shape), rotary, positions)
                .unwrap();
            let begin = if cu_seqlens.is_some() { [0, 3, 9] } else { [0, 5, 10] };
            for row in 0..begin[2] {
                let sequence = usize::from(row >= begin[1]);
                let step = if advance { row - begin[sequence] } else { 0 };
                let position = [4, 0][sequence] + step;
                close(&out[row * 6..][..6], &turned(&x[row * 6..][..6], position, false));
            }
            assert!(out[begin[2] * 6..].iter().all(|x| *x == -1.0));
        }
    }
}

#[test]
fn halves_are_turned_in_f32_and_codes_are_copied() {
    let mut x = Tensor::zeros([1, 1, 1, 4], DType::BF16, Layout::Bhsd);
    // 1, 2, 3, 4 in bf16.
    x.bytes_mut().copy_from_slice(&[0x80, 0x3F, 0x00, 0x40, 0x40, 0x40, 0x80, 0x40]);
    let (cos, sin) = angles(3);
    let rotary = Rotary { cos: view(&cos, [1, 1, 3, 2]), sin: view(&sin, [1, 1, 3, 2]), interleaved: true };
    let mut out = Tensor::zeros([1, 1, 1, 4], DType::BF16, Layout::Bhsd);
    let positions = Positions { first: &[2], cu_seqlens: None, advance: true };
    cache::rotate(Device::Cpu, x.view(), out.view_mut(), rotary, positions).unwrap();
    let mut row = [0.0; 4];
    out.view().read_row(0, 0, 0, &mut row);
    for (got, wanted) in row.iter().zip(turned(&[1.0, 2.0, 3.0, 4.0], 2, true)) {
        assert!((f64::from(*got) - wanted).abs() <= wanted.abs() / 256.0, "{row:?}");
    }
    let codes = [7u8, 8, 9, 10];
    let new = TensorView::new(&codes, DType::E4M3, [1, 1, 1, 4], [4, 4, 4, 1]).unwrap();
    let (mut k, mut v) = ([0u8; 8], [0u8; 8]);
    let caches = [&mut k, &mut v]
        .map(|cache| TensorViewMut::new(cache, DType::E4M3, [1, 1, 2, 4], [8, 8, 4, 1]).unwrap());
    let tokens = NewTokens { lengths: &[1], ..NewTokens::default() };
    cache::append(Device::Cpu, caches, [new, new], &tokens, None).unwrap();
    assert_eq!((k[4..].to_vec(), v[..4].to_vec()), (codes.to_vec(), vec![0; 4]));
}

#[test]
fn nothing_is_written_when_something_does_not_fit() {
    let (shape, new_shape) = ([2, 1, 4, 4], [2, 1, 1, 4]);
    let new = numbers(8, 1.0);
    let (cos, sin) = angles(3);
    let rotary = Rotary { cos: view(&cos, [1, 1, 3, 2]), sin: view(&sin, [1, 1, 3, 2]), interleaved: true };
    let refused = |lengths: &[i32], v_shape: [usize; 4], rotary, device| {
        let (mut k_cache, mut v_cache) = (vec![-1.0f32; 32], vec![-1.0f32; 32]);
        let caches = [view_mut(&mut k_cache, shape), view_mut(&mut v_cache, shape)];
        let news = [view(&new, new_shape), view(&new, v_shape)];
        let tokens = NewTokens { lengths, ..NewTokens::default() };
        let error = cache::append(device, caches, news, &tokens, rotary).unwrap_err().to_string();
        assert!(k_cache.iter().chain(&v_cache).all(|x| *x == -1.0), "{error}");
        error
    };
    let cpu = Device::Cpu;
    assert!(refused(&[4, 0], new_shape, None, cpu).contains("holds 4 tokens and gets 1 more"));
    assert!(refused(&[0, -3], new_shape, None, cpu).contains("-3 keys"));
    assert!(refused(&[0, 0], [1, 1, 2, 4], None, cpu).contains("[1, 1, 2, 4]"));
    assert!(refused(&[0, 3], new_shape, Some((rotary, None)), cpu).contains("position 3"));
    assert!(refused(&[0, 0], new_shape, Some((rotary, Some(&[0, -1]))), cpu).contains("position -1"));
    assert!(refused(&[0, 0], new_shape, Some((rotary, Some(&[0]))), cpu).contains("2 sequences"));
    let wide = Rotary { cos: view(&cos, [1, 1, 2, 3]), sin: view(&sin, [1, 1, 2, 3]), interleaved: true };
    assert!(refused(&[0, 0], new_shape, Some((wide, None)), cpu).contains("3 columns"));
    #[cfg(feature = "cuda")]
    assert!(refused(&[0, 0], new_shape, None, Device::Cuda(0)).contains("cuda:0"));
}
