//! What an H200 answered to the kernels of `capture.cu` (its header comes from `generate.py`, its PTX is `capture.ptx`), against the
//! same PTX run here.

use ptxsan::tensor::wgmma::{Descriptor, Major, Product, Swizzle};
use ptxsan::tensor::{Accumulate, Accumulator, Element, Shape};
use ptxsan::{Arg, Device, Launch, Module, TensorElement, TensorMap};
use std::collections::HashMap;

const PTX: &str = include_str!("capture.ptx");
const FACTS: &str = include_str!("h200.txt");
const BLOB: &[u8] = include_bytes!("h200.bin");
const IMAGE_BYTES: usize = 48 * 1024;
const TILE_BYTES: usize = 8192;

/// One record: its name, `key=value` facts, and the bytes that came back.
struct Record {
    name: &'static str,
    facts: HashMap<&'static str, &'static str>,
    bytes: &'static [u8],
}

impl Record {
    fn number(&self, key: &str) -> i64 {
        self.facts[key].parse().unwrap()
    }

    fn hex(&self, key: &str) -> u64 {
        u64::from_str_radix(self.facts[key], 16).unwrap()
    }

    fn list(&self, key: &str) -> Vec<i64> {
        self.facts[key].split(',').filter(|part| !part.is_empty()).map(|part| part.parse().unwrap()).collect()
    }
}

fn records() -> impl Iterator<Item = Record> {
    FACTS.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (left, right) = line.split_once(" = ").unwrap();
        let mut words = left.split(' ');
        let name = words.next().unwrap();
        let facts = words.filter_map(|word| word.split_once('=')).collect();
        let place: Vec<usize> = right.split(' ').map(|n| n.parse().unwrap()).collect();
        Record { name, facts, bytes: &BLOB[place[0]..place[0] + place[1]] }
    })
}

fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Bits, bits of exponent and mantissa, the exponent field of 1.
fn format(name: &str) -> (u32, u32, u32, u32) {
    match name {
        "f16" => (16, 5, 10, 15),
        "bf16" => (16, 8, 7, 127),
        "tf32" => (32, 8, 23, 127),
        "e4m3" => (8, 4, 3, 7),
        "e5m2" => (8, 5, 2, 15),
        _ => (8, 0, 8, 0),
    }
}

fn code(name: &str, style: i64, h: u32) -> u32 {
    let (bits, exponent, mantissa_bits, one) = format(name);
    if exponent == 0 {
        return h & 0xff;
    }
    let sign = (h >> 31) << (bits - 1);
    let (mantissa, pick) = (h & ((1 << mantissa_bits) - 1), h >> 24 & 0x7f);
    match style {
        0 if pick % 4 == 0 => 0,
        0 => {
            let magnitude = pick % 4;
            let half = if magnitude == 3 { 1 << (mantissa_bits - 1) } else { 0 };
            sign | (one + u32::from(magnitude > 1)) << mantissa_bits | half
        }
        1 => sign | (one - 2 + pick % 4) << mantissa_bits | mantissa,
        _ => {
            let (low, span) = (one.saturating_sub(8), if exponent == 4 { 15 } else { 16 });
            sign | (low + pick % span) << mantissa_bits | mantissa
        }
    }
}

fn fill(image: &mut [u8], name: &str, style: i64, seed: u32) {
    let bytes = format(name).0 as usize / 8;
    for (i, place) in image.chunks_exact_mut(bytes).enumerate() {
        place.copy_from_slice(
            &code(name, style, mix(mix(seed).wrapping_add(i as u32))).to_le_bytes()[..bytes],
        );
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn element(name: &str) -> Element {
    match name {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        "s8" => Element::S8,
        _ => Element::U8,
    }
}

/// A `wgmma` of the capture: image, start and result of the simulator, and the sum of the terms' sizes for every word of D.
struct Run {
    got: Vec<u32>,
    sizes: Vec<f64>,
    is_exact: bool,
    d: String,
    a: String,
}

fn run_wgmma(device_module: &Module, record: &Record, mode: Accumulate) -> Run {
    let parts: Vec<&str> = record.name.split('_').collect();
    let (d, a, b, is_rs) = (parts[2], parts[3], parts[4], parts[5] == "rs");
    let style = record.number("style");
    let seed = 3 * record.number("seed") as u32;
    let mut image = vec![0; IMAGE_BYTES];
    fill(&mut image[..16384], a, style, seed);
    fill(&mut image[16384..], b, style, seed + 1);
    let start: Vec<u32> = (0..record.bytes.len() / 4)
        .map(|i| {
            let h = mix(mix(seed + 2).wrapping_add(i as u32));
            match d {
                "s32" => (h % 2001).wrapping_sub(1000),
                "f32" if style == 0 => ((h % 17) as f32 - 8.0).to_bits(),
                "f32" => (((h % 20001) as i32 - 10000) as f32 / 4096.0).to_bits(),
                _ => code("f16", 0, h) | code("f16", 0, mix(h)) << 16,
            }
        })
        .collect();
    let mut device = Device::new();
    let id = device.load(device_module).unwrap();
    let buffer = |device: &mut Device, name: &str, bytes: &[u8]| device.upload(name, bytes).unwrap();
    let images = buffer(&mut device, "image", &image);
    let raw: Vec<u8> = start.iter().flat_map(|word| word.to_le_bytes()).collect();
    let c = buffer(&mut device, "c", &raw);
    let out = buffer(&mut device, "d", &vec![0; raw.len()]);
    let adds = record.number("scale") != 0;
    let args = vec![
        Arg::Buffer(images),
        Arg::Buffer(c),
        Arg::Buffer(out),
        Arg::U64(record.hex("a")),
        Arg::U64(record.hex("b")),
        Arg::I32(i32::from(adds)),
    ];
    let mut launch = Launch::new(record.name, [1; 3], [128, 1, 1], IMAGE_BYTES as u32, args);
    launch.options.accumulate = mode;
    let outcome = device.launch(id, &launch).unwrap();
    assert!(outcome.is_clean(), "{}: {outcome}", record.name);
    let got = words(&device.read(out).unwrap());

    // The same product over the sizes of its terms: what rounding may lose is a share of it.
    let shape: Vec<usize> = parts[1].split(['m', 'n', 'k']).filter_map(|n| n.parse().ok()).collect();
    let d_type = match d {
        "f32" => Accumulator::F32,
        "s32" => Accumulator::S32,
        _ => Accumulator::F16,
    };
    let product =
        Product::new(Shape::new(shape[0], shape[1], shape[2]), d_type, element(a), element(b)).unwrap();
    let majors: Vec<Major> = parts[6].chars().map(|c| if c == '1' { Major::Mn } else { Major::K }).collect();
    let product = Product { a_major: majors[0], b_major: majors[1], ..product };
    let read = |operand: &str, major: Major, first: usize, count: usize| -> Vec<[u8; 16]> {
        let pieces = product.pieces(Descriptor::decode(record.hex(operand)), major, first, count);
        pieces.map(|piece| image[piece.address..piece.address + 16].try_into().unwrap()).collect()
    };
    let right = product.right_from_memory(&read("b", product.b_major, 0, product.shape.n));
    let mut sizes = vec![0.0; start.len()];
    for warp in 0..4 {
        let left = if is_rs {
            let registers: Vec<[u32; 32]> = (0..4)
                .map(|i| {
                    std::array::from_fn(|lane| words(&image[512 * i + 4 * (32 * warp + lane)..][..4])[0])
                })
                .collect();
            product.left_from_registers(&registers)
        } else {
            product.left_from_memory(&read("a", product.a_major, 16 * warp, 16))
        };
        for element in 0..product.d.elements() {
            let (register, shift) = product.d.position(element);
            for lane in 0..32 {
                let (row, col) = product.d.coordinates(lane, element).unwrap();
                let n = product.shape.n;
                let terms = (0..product.shape.k)
                    .map(|k| (left[row * product.shape.k + k] * right[k * n + col]).abs());
                let at = register * 128 + 32 * warp + lane;
                let own = match (adds, d) {
                    (true, "f32") => f64::from(f32::from_bits(start[at])).abs(),
                    (true, "f16") => f64::from(Element::F16.to_f32(start[at] >> shift & 0xffff)).abs(),
                    _ => 0.0,
                };
                sizes[at] = f64::max(sizes[at], terms.sum::<f64>() + own);
            }
        }
    }
    Run { got, sizes, is_exact: style == 0 || d == "s32", d: d.to_owned(), a: a.to_owned() }
}

/// Sums of small integers are exact. Others lose what falls below the largest term when the terms of an instruction are aligned and
/// added at once: of the 16- and 19-bit types an H200 keeps about 25 bits below it, of the 8-bit ones 13. With up to 32 terms that
/// stays below 2^-21 and 2^-10 of the sum of their sizes.
#[test]
fn wgmma_is_that_of_the_machine() {
    let module = Module::parse(PTX).unwrap();
    let mut worst: HashMap<String, f64> = HashMap::new();
    let mut count = 0;
    for record in records().filter(|r| r.name.starts_with("wgmma")) {
        let run = run_wgmma(&module, &record, Accumulate::Double);
        let expected = words(record.bytes);
        count += 1;
        if run.is_exact {
            assert_eq!(run.got, expected, "{} {:?}", record.name, record.facts);
            continue;
        }
        for (at, (ours, theirs)) in run.got.iter().zip(&expected).enumerate() {
            let values = |word: u32| match run.d.as_str() {
                "f32" => vec![f64::from(f32::from_bits(word))],
                _ => vec![
                    f64::from(Element::F16.to_f32(word & 0xffff)),
                    f64::from(Element::F16.to_f32(word >> 16)),
                ],
            };
            for (x, y) in values(*ours).into_iter().zip(values(*theirs)) {
                // An f16 result is rounded to 11 bits on top.
                let rounding = if run.d == "f16" { f64::max(x.abs(), y.abs()) * 2f64.powi(-10) } else { 0.0 };
                let share = ((x - y).abs() - rounding).max(0.0) / run.sizes[at];
                let entry = worst.entry(format!("{} {}", run.d, run.a)).or_default();
                *entry = entry.max(share);
            }
        }
    }
    assert!(count > 100, "{count}");
    for (types, share) in &worst {
        let bound =
            if types.contains("e4m3") || types.contains("e5m2") { 2f64.powi(-10) } else { 2f64.powi(-21) };
        assert!(*share <= bound, "{types}: {share:e} of the terms, more than {bound:e}: {worst:?}");
    }
}

#[test]
fn mbarriers_answer_as_the_machine_does() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let out = device.upload("out", &[0xff; 512]).unwrap();
    let outcome = device
        .launch(id, &Launch::new("mbarrier_answers", [1; 3], [1; 3], 0, vec![Arg::Buffer(out)]))
        .unwrap();
    let record = records().find(|r| r.name == "mbarrier_answers").unwrap();
    assert_eq!(device.read(out).unwrap(), record.bytes, "{outcome}");
}

#[test]
fn clusters_are_numbered_as_on_the_machine() {
    let module = Module::parse(PTX).unwrap();
    for (shape, (grid, cluster)) in
        [([8, 1, 1], [4, 1, 1]), ([4, 4, 1], [2, 2, 1]), ([8, 2, 1], [8, 1, 1])].into_iter().enumerate()
    {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let out = device.upload("out", &[0; 4096]).unwrap();
        let mut launch = Launch::new("cluster_answers", grid, [32, 1, 1], 0, vec![Arg::Buffer(out)]);
        launch.cluster = cluster;
        let outcome = device.launch(id, &launch).unwrap();
        let record =
            records().find(|r| r.name == "cluster_answers" && r.number("shape") == shape as i64).unwrap();
        let (ours, theirs) = (words(&device.read(out).unwrap()), words(record.bytes));
        for (block, (ours, theirs)) in ours.chunks(64).zip(theirs.chunks(64)).enumerate() {
            // From 40 on stands how addresses are spelt, which is each machine's own business.
            assert_eq!(ours[..40], theirs[..40], "block {block} of shape {shape}: {outcome}");
        }
    }
}

#[test]
fn tensor_copies_are_those_of_the_machine() {
    let module = Module::parse(PTX).unwrap();
    let mut count = 0;
    for record in records().filter(|r| r.name == "tensor") {
        let rank = record.number("rank") as usize;
        let kind = TensorElement::ALL[record.number("type") as usize];
        let name = match kind {
            TensorElement::F16 => "f16",
            TensorElement::Bf16 => "bf16",
            TensorElement::F32 => "tf32",
            _ => "u8",
        };
        let (number, store) = (record.number("number") as u32, record.number("store"));
        let (mut tensor, mut tile) = (vec![0; 16384], vec![0; TILE_BYTES]);
        fill(&mut tensor, name, 1, 100_000 + 2 * number);
        fill(&mut tile, name, 1, 100_001 + 2 * number);
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let memory = device.upload("tensor", &tensor).unwrap();
        tile.extend([0; 4]);
        let tiles = device.upload("tile", &tile).unwrap();
        let unsigned = |key: &str| record.list(key).into_iter().map(|n| n as u32).collect::<Vec<u32>>();
        let map = TensorMap {
            address: memory.address(),
            element: kind,
            sizes: record.list("dims").into_iter().map(|n| n as u64).collect(),
            strides_bytes: record.list("pitches").into_iter().map(|n| n as u64).collect(),
            box_sizes: unsigned("box"),
            element_strides: unsigned("strides"),
            swizzle: [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128]
                [record.number("swizzle") as usize],
            is_nan_outside: record.number("fill") != 0,
        };
        let first = if store > 0 { store - 1 } else { record.number("bytes") } as i32;
        let mut args = vec![Arg::Bytes(map.encode().unwrap().to_vec()), Arg::Buffer(tiles), Arg::I32(first)];
        args.push(Arg::I32(record.number("at") as i32));
        let mut coordinates = record.list("coords");
        coordinates.resize(5, 0);
        args.extend(coordinates.iter().map(|c| Arg::I32(*c as i32)));
        let entry = format!("tensor_{}_{rank}", if store > 0 { "store" } else { "load" });
        let outcome =
            device.launch(id, &Launch::new(&entry, [1; 3], [128, 1, 1], TILE_BYTES as u32, args)).unwrap();
        assert!(outcome.is_clean(), "{:?}: {outcome}", record.facts);
        let got = device.read(if store > 0 { memory } else { tiles }).unwrap();
        let differs = got.iter().zip(record.bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "first byte that differs of {:?}", record.facts);
        count += 1;
    }
    assert!(count > 60, "{count}");
}
