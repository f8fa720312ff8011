//! The matrix instructions of a capture.

use ptxsan::numeric::Round;
use ptxsan::numeric::format::{F16, F32, F64};
use ptxsan::tensor::contraction::sum_products;
use ptxsan::tensor::mma::Mma;
use ptxsan::tensor::transfer::{Matrix, collect, distribute, row_from_words, row_to_words, transpose};
use ptxsan::tensor::wgmma::{Descriptor, Major, d_fragment};
use ptxsan::tensor::wmma::{Operand, Wmma, fragment};
use ptxsan::tensor::{Accumulate, Accumulator, Contraction, Element, Fragment, Lanes, Layout, Shape};

/// Words, listed register by register, as registers.
fn registers(words: &[u64]) -> Vec<Lanes> {
    let register = |chunk: &[u64]| std::array::from_fn(|lane| chunk.get(lane).copied().unwrap_or(0) as u32);
    words.chunks(32).map(register).collect()
}

/// `m16n8k16`
fn shape_of(part: &str) -> Option<Shape> {
    let (m, rest) = part.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(Shape::new(m.parse().ok()?, n.parse().ok()?, k.parse().ok()?))
}

fn element_of(part: &str) -> Option<Element> {
    Some(match part {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        "f64" => Element::F64,
        "s8" => Element::S8,
        "u8" => Element::U8,
        "s4" => Element::S4,
        "u4" => Element::U4,
        _ => return None,
    })
}

fn accumulator_of(part: &str) -> Option<Accumulator> {
    Some(match part {
        "f16" => Accumulator::F16,
        "f32" => Accumulator::F32,
        "f64" => Accumulator::F64,
        "s32" => Accumulator::S32,
        _ => return None,
    })
}

fn layout_of(part: &str) -> Layout {
    if part == "col" { Layout::Col } else { Layout::Row }
}

fn parse_mma(name: &str) -> Option<(Mma, Contraction)> {
    let parts: Vec<&str> = name.split('.').collect();
    let [d, a, b, c] = parts.last_chunk::<4>()?;
    let mma = Mma {
        a_layout: layout_of(parts[4]),
        b_layout: layout_of(parts[5]),
        d: accumulator_of(d)?,
        b: element_of(b)?,
        satfinite: parts.contains(&"satfinite"),
        round: if parts.contains(&"rz") { Round::TowardZero } else { Round::NearestEven },
        ..Mma::new(shape_of(parts[3])?, element_of(a)?, accumulator_of(c)?)
    };
    Some((mma, mma.contraction()?))
}

/// Element `(row, col)` of every distinct place, as a value.
fn values(fragment: &Fragment, registers: &[Lanes], value: impl Fn(u64) -> f64) -> Vec<f64> {
    let mut matrix = vec![0.0; fragment.rows() * fragment.cols()];
    let mask = u64::MAX >> (64 - fragment.element_bits());
    for element in 0..fragment.distinct_elements() {
        let (register, shift) = fragment.position(element);
        for lane in 0..32 {
            if let Some((row, col)) = fragment.coordinates(lane, element) {
                let high = registers.get(register + 1).map_or(0, |next| next[lane] as u64);
                let word = registers[register][lane] as u64 | high << 32;
                matrix[row * fragment.cols() + col] = value((word >> shift) & mask);
            }
        }
    }
    matrix
}

fn accumulator_value(kind: Accumulator) -> impl Fn(u64) -> f64 {
    move |bits| match kind {
        Accumulator::F16 => F16.widen(bits),
        Accumulator::F64 => f64::from_bits(bits),
        _ => f32::from_bits(bits as u32) as f64,
    }
}

fn element_value(element: Element) -> impl Fn(u64) -> f64 {
    move |bits| match element {
        Element::F64 => f64::from_bits(bits),
        _ => element.to_f32(bits as u32) as f64,
    }
}

pub(crate) fn check_mma(name: &str, inputs: &[u64], outputs: &[u64]) -> Result<(), String> {
    let (mma, product) = parse_mma(name).ok_or("no such mma is known")?;
    let (style, words) = inputs.split_first().ok_or("no inputs")?;
    let all = registers(words);
    let (na, nb) = (product.a().registers(), product.b().registers());
    if all.len() != na + nb + product.c().registers() {
        return Err(format!("{} registers given", all.len()));
    }
    let (a, rest) = all.split_at(na);
    let (b, c) = rest.split_at(nb);
    let got = registers(outputs);
    let mut d = vec![[0; 32]; product.d().registers()];
    product.execute(a, b, c, &mut d, Accumulate::Double).map_err(|error| error.to_string())?;
    let exact = *style == 0 || mma.d == Accumulator::S32;
    if exact {
        return if got == d { Ok(()) } else { Err("differs where every sum is exact".to_string()) };
    }
    // The largest term decides what a truncating, aligning adder loses.
    let a = values(product.a(), a, element_value(mma.a));
    let b = values(product.b(), b, element_value(mma.b));
    let c = values(product.c(), c, accumulator_value(mma.c));
    let got = values(product.d(), &got, accumulator_value(mma.d));
    let want = values(product.d(), &d, accumulator_value(mma.d));
    let Shape { m, n, k } = mma.shape;
    // 8-bit products are summed in fewer bits than PTX promises (about 14 on sm_90, DeepSeek-V3
    // technical report, section 3.3.2); the others in at least 24, or half precision where D is.
    let unit = match (mma.a.bits(), mma.d) {
        (8, _) => 2f64.powi(-13),
        (_, Accumulator::F16) => 2f64.powi(-11),
        (_, Accumulator::F64) => 2f64.powi(-52),
        _ => 2f64.powi(-23),
    };
    for row in 0..product.d().rows() {
        for col in 0..n {
            let b_col = row / m * n + col;
            let start = c[row * n + col];
            let terms = (0..k).map(|i| a[row * k + i] * b[i * product.b().cols() + b_col]);
            let largest = terms.fold(start.abs(), |largest, term| largest.max(term.abs()));
            let (got, want) = (got[row * n + col], want[row * n + col]);
            let format = match mma.d {
                Accumulator::F16 => &F16,
                Accumulator::F64 => &F64,
                _ => &F32,
            };
            let bound = (k + 2) as f64 * unit * largest + format.ulp(want);
            let overflowed = got.is_infinite() && want.abs() + bound > 65504.0 && mma.d == Accumulator::F16;
            if got != want && !overflowed && (got - want).abs() > bound {
                return Err(format!("d[{row}][{col}] is {got:e}, computed {want:e}, bound {bound:e}"));
            }
        }
    }
    Ok(())
}

/// A matrix in memory, as words.
struct Memory<'a>(&'a [u64]);

impl Memory<'_> {
    fn element(&self, index: usize, bits: usize) -> u64 {
        let word = self.0[index * bits / 32];
        (word >> (index * bits % 32)) & (u64::MAX >> (64 - bits))
    }

    /// What `wmma.load` puts into the registers of `fragment`.
    fn load(&self, fragment: &Fragment, layout: Layout) -> Vec<Lanes> {
        let stride = if layout == Layout::Row { fragment.cols() } else { fragment.rows() };
        let mut registers = vec![[0u32; 32]; fragment.registers()];
        for element in 0..fragment.elements() {
            let (register, shift) = fragment.position(element);
            for lane in 0..32 {
                if let Some((row, col)) = fragment.coordinates(lane, element) {
                    let code = self.element(layout.offset(row, col, stride), fragment.element_bits());
                    registers[register][lane] |= (code << shift) as u32;
                }
            }
        }
        registers
    }
}

pub(crate) fn check_wmma(name: &str, inputs: &[u64], outputs: &[u64]) -> Result<(), String> {
    let parts: Vec<&str> = name.split('.').collect();
    let &[_, shape, a_layout, b_layout, element, accumulator] = parts.as_slice() else {
        return Err("six parts expected".to_string());
    };
    let parsed = shape_of(shape).zip(element_of(element)).zip(accumulator_of(accumulator));
    let ((shape, element), kind) = parsed.ok_or("no such wmma is known")?;
    let product = Wmma::new(shape, element, kind).contraction().ok_or("no such wmma is known")?;
    let words = |rows: usize, cols: usize, bits: usize| rows * cols * bits / 32;
    let (a_words, b_words) =
        (words(shape.m, shape.k, element.bits()), words(shape.k, shape.n, element.bits()));
    let (a, rest) = inputs.split_at(a_words);
    let (b, c) = rest.split_at(b_words);
    let load = |memory, operand, layout| {
        fragment(shape, operand).map(|fragment| Memory(memory).load(&fragment, layout))
    };
    let a = load(a, Operand::A(element), layout_of(a_layout)).ok_or("a")?;
    let b = load(b, Operand::B(element), layout_of(b_layout)).ok_or("b")?;
    let c = load(c, Operand::C(kind), Layout::Row).ok_or("c")?;
    let mut d = vec![[0; 32]; product.d().registers()];
    product.execute(&a, &b, &c, &mut d, Accumulate::Double).map_err(|error| error.to_string())?;
    // D was stored by columns; loading it so gives back its registers.
    let got = Memory(outputs).load(product.d(), Layout::Col);
    if got == d { Ok(()) } else { Err("differs where every sum is exact".to_string()) }
}

pub(crate) fn check_transfer(name: &str, inputs: &[u64], outputs: &[u64]) -> Result<(), String> {
    let transposed = name.ends_with(".trans");
    let count = if name.contains(".x4") { 4 } else { 1 + name.contains(".x2") as usize };
    // Matrices in memory, row after row, and what is beyond them.
    let matrices = |words: &[u64]| -> Vec<Matrix> {
        words
            .chunks_exact(32)
            .map(|matrix| {
                std::array::from_fn(|row| row_from_words(std::array::from_fn(|i| matrix[row * 4 + i] as u32)))
            })
            .collect()
    };
    let in_registers = registers(inputs);
    let mut want = vec![[0u32; 32]; 4];
    for (j, want) in want.iter_mut().enumerate().take(count) {
        *want = match name.split('.').next() {
            Some("ldmatrix") => distribute(&matrices(inputs)[j], transposed),
            Some("movmatrix") => transpose(&in_registers[0]),
            _ => {
                let rows = collect(&in_registers[j], transposed).map(row_to_words);
                std::array::from_fn(|i| rows[i / 4][i % 4])
            }
        };
    }
    if registers(outputs) == want { Ok(()) } else { Err("elements out of place".to_string()) }
}

/// The f16 that `capture.cu` put at half `i` of shared memory, as a value.
fn shared_value(i: usize) -> f32 {
    (((i as u32).wrapping_mul(2654435761) >> 24) % 5) as f32 - 2.0
}

pub(crate) fn check_wgmma(inputs: &[u64], outputs: &[u64]) -> Result<(), String> {
    let &[a, b, trans_a, trans_b] = inputs else { return Err("four inputs expected".to_string()) };
    let (a, b) = (Descriptor::decode(a), Descriptor::decode(b));
    let major = |trans: u64| if trans == 1 { Major::Mn } else { Major::K };
    let row = |descriptor: &Descriptor, trans: u64, mn: usize| -> [f32; 16] {
        std::array::from_fn(|k| shared_value(descriptor.address(major(trans), mn, k, 2) / 2))
    };
    let fragment = d_fragment(64, Accumulator::F32).ok_or("no such fragment")?;
    let got = registers(outputs);
    if got.len() != 4 * fragment.registers() {
        return Err(format!("{} registers given", got.len()));
    }
    for (warp, got) in got.chunks(fragment.registers()).enumerate() {
        for element in 0..fragment.elements() {
            for lane in 0..32 {
                let (m, n) = fragment.coordinates(lane, element).ok_or("beyond the fragment")?;
                let x = row(&a, trans_a, warp * 16 + m);
                let y = row(&b, trans_b, n);
                let want = sum_products(0.0, &x, &y, Accumulate::Double) as f32;
                if f32::from_bits(got[element][lane]) != want {
                    let place = format!("d[{}][{n}]", warp * 16 + m);
                    return Err(format!(
                        "{place} is {}, computed {want}",
                        f32::from_bits(got[element][lane])
                    ));
                }
            }
        }
    }
    Ok(())
}
