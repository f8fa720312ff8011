//! Kernel arguments as written on the command line.

use crate::npy::{self, About};
use crate::options::parse_size;
use crate::session::{Output, Session};
use crate::values;
use anyhow::{Context, Result, bail};
use ptxsan::tensor::wgmma::Swizzle;
use ptxsan::{Arg, Buffer, TensorElement, TensorMap};

/// Of a tensor map within a structure.
const MAP_ALIGN: usize = 64;

static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

const KINDS: &str = "in, out, inout, zeros, fresh, i32, u32, i64, u64, f32, f64, i8, u8, i16, u16, f16, bf16, bytes, struct, map, \
                     ptr, and @NAME";

/// Numbers that are handed over as their bytes; a bool is a u8.
const NARROW: [&str; 6] = ["i8", "u8", "i16", "u16", "f16", "bf16"];

/// Binds the arguments of a launch to buffers of the session's device.
pub(crate) fn bind(session: &mut Session, texts: &[String]) -> Result<Vec<Arg>> {
    let mut args = Vec::new();
    // Tensor maps are made last, when all buffers are there.
    let mut maps = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let context = || format!("argument {index} (`{text}`)");
        if let Some(map) = text.strip_prefix("map:") {
            maps.push((index, map));
            args.push(Arg::Bytes(Vec::new()));
        } else {
            args.push(argument(session, text, index).with_context(context)?);
        }
    }
    for (index, text) in maps {
        let made = map(session, &args, text).and_then(|map| Ok(map.encode()?));
        args[index] = Arg::Bytes(made.with_context(|| format!("argument {index} (`map:{text}`)"))?.to_vec());
    }
    Ok(args)
}

/// `NAME=KIND:VALUE`, a buffer that no launch takes as an argument.
pub(crate) fn buffer(session: &mut Session, text: &str) -> Result<Buffer> {
    match argument(session, text, 0)? {
        Arg::Buffer(buffer)
            if text.split_once('=').is_some_and(|(name, _)| session.named.contains_key(name)) =>
        {
            Ok(buffer)
        }
        _ => bail!("expected NAME=KIND:VALUE, such as a=zeros:64K or a=in:a.npy"),
    }
}

/// `KIND:VALUE`, with a name before it or not.
fn argument(session: &mut Session, text: &str, index: usize) -> Result<Arg> {
    let is_name = |name: &str| !name.is_empty() && !name.contains([':', '+', '/', '.']);
    if let Some((name, text)) = text.split_once('=').filter(|(name, _)| is_name(name)) {
        let arg = value(session, text, name)?;
        let Arg::Buffer(buffer) = arg else { bail!("only a buffer can have a name; leave `{name}=` out") };
        if session.named.insert(name.to_owned(), buffer).is_some() {
            bail!("there is a buffer `{name}` already; @{name} is that one again");
        }
        return Ok(arg);
    }
    match text.strip_prefix("struct:") {
        None => value(session, text, &format!("arg{index}")),
        Some(parts) => structure(session, parts, index),
    }
}

/// Fields lie at multiples of their size, as in C.
fn structure(session: &mut Session, parts: &str, index: usize) -> Result<Arg> {
    let mut bytes: Vec<u8> = Vec::new();
    let mut widest = 1;
    for (k, part) in parts.split('+').enumerate() {
        let field = match value(session, part, &format!("arg{index}.{k}"))? {
            // The compiler's type for them asks for as much.
            Arg::Bytes(map) if part.starts_with("map:") => {
                bytes.resize(bytes.len().next_multiple_of(MAP_ALIGN), 0);
                widest = widest.max(MAP_ALIGN);
                map
            }
            Arg::Bytes(raw) if !part.split_once(':').is_some_and(|(kind, _)| NARROW.contains(&kind)) => raw,
            other => {
                let raw = scalar_bytes(&other)?;
                bytes.resize(bytes.len().next_multiple_of(raw.len()), 0);
                widest = widest.max(raw.len());
                raw
            }
        };
        bytes.extend(field);
    }
    bytes.resize(bytes.len().next_multiple_of(widest), 0);
    Ok(Arg::Bytes(bytes))
}

/// One argument, or one field of a structure.
fn value(session: &mut Session, text: &str, name: &str) -> Result<Arg> {
    if let Some(name) = text.strip_prefix('@') {
        return Ok(Arg::Buffer(session.buffer(name)?));
    }
    let Some((kind, value)) = text.split_once(':') else {
        bail!("expected KIND:VALUE, such as zeros:64K or f32:2.0; kinds are {KINDS}");
    };
    Ok(match kind {
        "i32" => Arg::I32(number(kind, value)?),
        "u32" => Arg::U32(number(kind, value)?),
        "i64" => Arg::I64(number(kind, value)?),
        "u64" => Arg::U64(number(kind, value)?),
        "f32" => Arg::F32(number(kind, value)?),
        "f64" => Arg::F64(number(kind, value)?),
        "bytes" => Arg::Bytes(values::hex(value)?),
        narrow if NARROW.contains(&narrow) => match values::parse(narrow, value) {
            Some(bytes) if !value.contains(',') => Arg::Bytes(bytes?),
            _ => bail!("`{value}` is no number that {narrow} holds"),
        },
        "zeros" => {
            let buffer = session.device.allocate(name, size(value)?)?;
            // In pieces: what the device may hold twice over need not fit here as well.
            for at in (0..buffer.len()).step_by(ZEROS.len()) {
                session.device.write(buffer, at, &ZEROS[..ZEROS.len().min(buffer.len() - at)])?;
            }
            Arg::Buffer(buffer)
        }
        "fresh" => Arg::Buffer(session.device.allocate(name, size(value)?)?),
        "in" => Arg::Buffer(session.device.upload(value, &npy::read(value)?.bytes)?),
        "inout" => {
            let (from, to) = value.split_once(':').context("expected inout:FROM.npy:TO.npy")?;
            let array = npy::read(from)?;
            let buffer = session.device.upload(from, &array.bytes)?;
            session.outputs.push(Output { buffer, path: npy::writable(to)?, about: array.about });
            Arg::Buffer(buffer)
        }
        "out" => Arg::Buffer(output(session, value)?),
        // Within a structure or behind a pointer other arguments cannot be named by their place.
        "map" => Arg::Bytes(map(session, &[], value)?.encode()?.to_vec()),
        "ptr" => {
            let bytes = match argument(session, value, 0)? {
                Arg::Bytes(bytes) => bytes,
                other => scalar_bytes(&other)?,
            };
            Arg::Buffer(session.device.upload(name, &bytes)?)
        }
        other => bail!("`{other}` is no kind of argument; there are {KINDS}"),
    })
}

/// `FILE.npy:TYPE:2x3`.
fn output(session: &mut Session, text: &str) -> Result<Buffer> {
    let parts: Vec<&str> = text.split(':').collect();
    let [path, dtype, shape] = parts[..] else {
        bail!("expected out:FILE.npy:TYPE:SHAPE, such as out:y.npy:f32:2x3");
    };
    let sizes: Option<Vec<u64>> = shape.split('x').map(|part| part.parse().ok()).collect();
    let sizes = sizes.with_context(|| format!("`{shape}` is no shape; write whole numbers, such as 2x3"))?;
    let (about, bytes) = About::new(dtype, sizes)?;
    let file = npy::writable(path)?;
    let buffer = session.device.allocate(path, bytes)?;
    session.device.expect_written(buffer, true)?;
    session.outputs.push(Output { buffer, path: file, about });
    Ok(buffer)
}

/// `ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE]`, a tensor map of the buffer that another argument is.
fn map(session: &Session, args: &[Arg], text: &str) -> Result<TensorMap> {
    let parts: Vec<&str> = text.split(':').collect();
    let (of, kind, sizes, strides, box_sizes, swizzle) = match parts[..] {
        [of, kind, sizes, strides, boxes] => (of, kind, sizes, strides, boxes, "0"),
        [of, kind, sizes, strides, boxes, swizzle] => (of, kind, sizes, strides, boxes, swizzle),
        _ => bail!("expected map:ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE]"),
    };
    let buffer = match of.strip_prefix('@') {
        Some(name) => session.buffer(name)?,
        None => {
            let at = of.parse().ok().and_then(|index: usize| args.get(index));
            let Some(Arg::Buffer(buffer)) = at else {
                bail!("argument {of} is no buffer; name one by its place, counted from 0, or as @NAME");
            };
            *buffer
        }
    };
    let element = match kind {
        "u8" => TensorElement::U8,
        "u16" => TensorElement::U16,
        "u32" => TensorElement::U32,
        "i32" => TensorElement::S32,
        "f16" => TensorElement::F16,
        "bf16" => TensorElement::Bf16,
        "f32" => TensorElement::F32,
        _ => bail!("no element type `{kind}`; there are u8, u16, u32, i32, f16, bf16, f32"),
    };
    let numbers = |text: &str| -> Result<Vec<u64>> {
        let parts: Option<Vec<u64>> =
            text.split('x').filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect();
        parts.with_context(|| format!("`{text}`: whole numbers with x between them are needed, such as 64x8"))
    };
    let swizzle = match swizzle {
        "0" => Swizzle::None,
        "32" => Swizzle::Bytes32,
        "64" => Swizzle::Bytes64,
        "128" => Swizzle::Bytes128,
        _ => bail!("no swizzle of `{swizzle}` bytes; there are 0, 32, 64, 128"),
    };
    let box_sizes: Vec<u32> =
        numbers(box_sizes)?.into_iter().map(|n| n.min(u64::from(u32::MAX)) as u32).collect();
    Ok(TensorMap {
        address: buffer.address(),
        element,
        sizes: numbers(sizes)?,
        strides_bytes: numbers(strides)?,
        element_strides: vec![1; box_sizes.len()],
        box_sizes,
        swizzle,
        is_nan_outside: false,
    })
}

fn scalar_bytes(arg: &Arg) -> Result<Vec<u8>> {
    Ok(match arg {
        Arg::Buffer(b) => b.address().to_le_bytes().to_vec(),
        Arg::I32(v) => v.to_le_bytes().to_vec(),
        Arg::U32(v) => v.to_le_bytes().to_vec(),
        Arg::I64(v) => v.to_le_bytes().to_vec(),
        Arg::U64(v) => v.to_le_bytes().to_vec(),
        Arg::F32(v) => v.to_le_bytes().to_vec(),
        Arg::F64(v) => v.to_le_bytes().to_vec(),
        Arg::Bytes(raw) => raw.clone(),
        _ => bail!("not a scalar"),
    })
}

fn number<T: std::str::FromStr>(kind: &str, text: &str) -> Result<T> {
    text.parse().ok().with_context(|| format!("`{text}` is no number that {kind} holds"))
}

fn size(text: &str) -> Result<usize> {
    let bytes = parse_size(text).map_err(anyhow::Error::msg)?;
    usize::try_from(bytes).with_context(|| format!("{bytes} bytes are more than can be addressed"))
}
