//! Kernel arguments as written on the command line.

use anyhow::{Context, Result, bail};
use npyz::WriterBuilder;
use ptxsan::tensor::wgmma::Swizzle;
use ptxsan::{Arg, Buffer, Device, TensorElement, TensorMap};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read};
use std::path::PathBuf;

/// `X`, `X,Y` or `X,Y,Z`.
pub(crate) fn parse_extent(text: &str) -> std::result::Result<[u32; 3], String> {
    let mut out = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 3 {
        return Err("at most three numbers".into());
    }
    for (slot, part) in out.iter_mut().zip(parts) {
        *slot = part.trim().parse().map_err(|_| format!("`{part}` is not a number"))?;
    }
    Ok(out)
}

static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// A buffer to be written to a file after the launch.
struct Output {
    buffer: Buffer,
    path: PathBuf,
    dtype: npyz::DType,
    shape: Vec<u64>,
}

/// Arguments bound to buffers of a device.
#[derive(Default)]
pub(crate) struct Bound {
    pub(crate) args: Vec<Arg>,
    /// Tensor maps to be made: which arguments they are, and what of.
    maps: Vec<(usize, String)>,
    outputs: Vec<Output>,
}

impl Bound {
    /// The bytes of every buffer that was passed on its own.
    pub(crate) fn contents(&self, device: &mut Device) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        for arg in &self.args {
            if let Arg::Buffer(buffer) = arg {
                all.extend(device.read(*buffer)?);
            }
        }
        Ok(all)
    }

    /// Binds one argument of the command line.
    pub(crate) fn add(&mut self, device: &mut Device, text: &str, index: usize) -> Result<()> {
        if let Some(map) = text.strip_prefix("map:") {
            self.maps.push((self.args.len(), map.to_owned()));
            self.args.push(Arg::Bytes(Vec::new()));
            return Ok(());
        }
        let arg = match text.strip_prefix("struct:") {
            None => self.one(device, text, &format!("arg{index}"))?,
            Some(parts) => {
                let mut bytes: Vec<u8> = Vec::new();
                let mut widest = 1;
                for (k, part) in parts.split('+').enumerate() {
                    let field = match self.one(device, part, &format!("arg{index}.{k}"))? {
                        Arg::Bytes(raw) => raw,
                        other => {
                            let raw = scalar_bytes(&other)?;
                            // Fields lie at multiples of their size, as in C.
                            bytes.resize(bytes.len().next_multiple_of(raw.len()), 0);
                            widest = widest.max(raw.len());
                            raw
                        }
                    };
                    bytes.extend(field);
                }
                bytes.resize(bytes.len().next_multiple_of(widest), 0);
                Arg::Bytes(bytes)
            }
        };
        self.args.push(arg);
        Ok(())
    }

    /// Fills in the tensor maps, once all buffers are there.
    pub(crate) fn resolve_maps(&mut self) -> Result<()> {
        for (index, text) in std::mem::take(&mut self.maps) {
            let map = self.map(&text).and_then(|map| Ok(map.encode()?));
            self.args[index] =
                Arg::Bytes(map.with_context(|| format!("argument {index} (`map:{text}`)"))?.to_vec());
        }
        Ok(())
    }

    /// `ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE]`, a tensor map of the buffer that another argument is.
    fn map(&self, text: &str) -> Result<TensorMap> {
        let parts: Vec<&str> = text.split(':').collect();
        let (index, kind, sizes, strides, box_sizes, swizzle) = match parts[..] {
            [index, kind, sizes, strides, boxes] => (index, kind, sizes, strides, boxes, "0"),
            [index, kind, sizes, strides, boxes, swizzle] => (index, kind, sizes, strides, boxes, swizzle),
            _ => bail!("expected map:ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE]"),
        };
        let Some(Arg::Buffer(buffer)) = self.args.get(index.parse::<usize>()?) else {
            bail!("argument {index} is no buffer");
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
            text.split('x').filter(|part| !part.is_empty()).map(|part| Ok(part.parse()?)).collect()
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

    fn one(&mut self, device: &mut Device, text: &str, name: &str) -> Result<Arg> {
        let (kind, value) = text.split_once(':').context("expected KIND:VALUE")?;
        Ok(match kind {
            "i32" => Arg::I32(value.parse()?),
            "u32" => Arg::U32(value.parse()?),
            "i64" => Arg::I64(value.parse()?),
            "u64" => Arg::U64(value.parse()?),
            "f32" => Arg::F32(value.parse()?),
            "f64" => Arg::F64(value.parse()?),
            "bytes" => Arg::Bytes(hex(value)?),
            "zeros" => {
                let buffer = device.allocate(name, size(value)?)?;
                // In pieces: what the device may hold twice over need not fit here as well.
                for at in (0..buffer.len()).step_by(ZEROS.len()) {
                    device.write(buffer, at, &ZEROS[..ZEROS.len().min(buffer.len() - at)])?;
                }
                Arg::Buffer(buffer)
            }
            "fresh" => Arg::Buffer(device.allocate(name, size(value)?)?),
            "in" => Arg::Buffer(read_npy(device, value)?.0),
            "inout" => {
                let (from, to) = value.split_once(':').context("expected inout:FROM.npy:TO.npy")?;
                let (buffer, dtype, shape) = read_npy(device, from)?;
                self.outputs.push(Output { buffer, path: to.into(), dtype, shape });
                Arg::Buffer(buffer)
            }
            "out" => {
                let parts: Vec<&str> = value.split(':').collect();
                let [path, dtype, shape] = parts[..] else { bail!("expected out:FILE.npy:TYPE:2x3") };
                let (descr, bytes) = match dtype {
                    "f16" => ("<f2", 2),
                    "f32" => ("<f4", 4),
                    "f64" => ("<f8", 8),
                    "i8" => ("|i1", 1),
                    "u8" => ("|u1", 1),
                    "i16" => ("<i2", 2),
                    "u16" | "bf16" => ("<u2", 2),
                    "i32" => ("<i4", 4),
                    "u32" => ("<u4", 4),
                    "i64" => ("<i8", 8),
                    "u64" => ("<u8", 8),
                    other => bail!("`{other}` is no type: f16, bf16, f32, f64, i8…i64, u8…u64"),
                };
                let shape = shape.split('x').map(str::parse).collect::<std::result::Result<Vec<u64>, _>>()?;
                let count = shape
                    .iter()
                    .try_fold(bytes, |a: u64, n| a.checked_mul(*n))
                    .context("the shape is too large")?;
                let buffer = device.allocate(path, usize::try_from(count)?)?;
                device.expect_written(buffer, true)?;
                let dtype = npyz::DType::Plain(descr.parse().map_err(|_| anyhow::anyhow!("type"))?);
                self.outputs.push(Output { buffer, path: path.into(), dtype, shape });
                Arg::Buffer(buffer)
            }
            other => bail!("`{other}` is no kind of argument"),
        })
    }

    /// Writes the output buffers to their files.
    pub(crate) fn save(&self, device: &mut Device) -> Result<()> {
        for output in &self.outputs {
            let bytes = device.read(output.buffer)?;
            let file =
                File::create(&output.path).with_context(|| format!("writing {}", output.path.display()))?;
            let width = bytes.len() / output.shape.iter().product::<u64>().max(1) as usize;
            let writer = BufWriter::new(file);
            match width {
                1 => save_as(writer, output, bytes.iter().copied())?,
                2 => {
                    save_as(writer, output, bytes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])))?
                }
                4 => {
                    let words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
                    save_as(writer, output, words)?;
                }
                _ => {
                    let word = |c: &[u8]| c.iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
                    save_as(writer, output, bytes.chunks_exact(8).map(word))?;
                }
            }
        }
        Ok(())
    }
}

/// Writes words under the header of the output's own type, whose bits they are.
fn save_as<T: npyz::AutoSerialize>(
    mut to: impl std::io::Write,
    output: &Output,
    words: impl Iterator<Item = T>,
) -> Result<()> {
    let mut raw = Vec::new();
    let mut writer =
        npyz::WriteOptions::<T>::new().default_dtype().shape(&output.shape).writer(&mut raw).begin_nd()?;
    writer.extend(words)?;
    writer.finish()?;
    // The header names the type of the words; put the real one in its place. Both have the same length.
    let wanted = output.dtype.descr();
    let own = T::default_dtype().descr();
    let at = raw.windows(own.len()).take(256).position(|w| w == own.as_bytes());
    if let (Some(at), true) = (at, own.len() == wanted.len()) {
        raw[at..at + own.len()].copy_from_slice(wanted.as_bytes());
    }
    to.write_all(&raw)?;
    Ok(())
}

fn read_npy(device: &mut Device, path: &str) -> Result<(Buffer, npyz::DType, Vec<u64>)> {
    let file = File::open(path).with_context(|| format!("reading {path}"))?;
    let mut reader = BufReader::new(file);
    let header = npyz::NpyHeader::from_reader(&mut reader).with_context(|| format!("reading {path}"))?;
    let shape = header.shape().to_vec();
    let dtype = header.dtype();
    let width = match &dtype {
        npyz::DType::Plain(kind) if kind.endianness() == npyz::Endianness::Big => {
            bail!("{path}: big-endian numbers; save x.astype(x.dtype.newbyteorder('<'))")
        }
        npyz::DType::Plain(kind) => kind.num_bytes().context("an element of no size")?,
        _ => bail!("{path}: only plain element types"),
    };
    if ![1, 2, 4, 8].contains(&width) {
        bail!("{path}: elements of {width} bytes; there are kernels' types of 1, 2, 4 and 8");
    }
    if header.order() == npyz::Order::Fortran && shape.len() > 1 {
        bail!("{path}: in Fortran order; save np.ascontiguousarray(x)");
    }
    let count =
        shape.iter().try_fold(width as u64, |a, n| a.checked_mul(*n)).context("the shape is too large")?;
    let mut bytes = Vec::new();
    reader.take(count).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != count {
        bail!("{path}: {} bytes of data where {count} are needed", bytes.len());
    }
    Ok((device.upload(path, &bytes)?, dtype, shape))
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
        _ => bail!("not a scalar"),
    })
}

fn size(text: &str) -> Result<usize> {
    text.parse().with_context(|| format!("`{text}` is not a number of bytes"))
}

fn hex(text: &str) -> Result<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        bail!("an even number of hexadecimal digits is needed");
    }
    (0..text.len()).step_by(2).map(|i| Ok(u8::from_str_radix(&text[i..i + 2], 16)?)).collect()
}
