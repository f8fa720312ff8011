//! `.npy` files to buffers and back.

use anyhow::{Context, Result, bail};
use npyz::WriterBuilder;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Bytes with what a `.npy` file says of them.
pub(crate) struct Array {
    pub(crate) bytes: Vec<u8>,
    pub(crate) about: About,
}

/// Type and shape of an array.
#[derive(Clone)]
pub(crate) struct About {
    pub(crate) dtype: npyz::DType,
    pub(crate) shape: Vec<u64>,
}

impl About {
    /// An array of a named type, and its size in bytes.
    pub(crate) fn new(dtype: &str, shape: Vec<u64>) -> Result<(Self, usize)> {
        let (descr, width) = match dtype {
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
            other => bail!(
                "`{other}` is no type; there are f16, bf16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64"
            ),
        };
        let bytes = shape.iter().try_fold(width, |product: u64, n| product.checked_mul(*n));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.with_context(|| format!("shape {shape:?} has more bytes than can be addressed"))?;
        let dtype = npyz::DType::Plain(descr.parse().map_err(|_| anyhow::anyhow!("type {descr}"))?);
        Ok((About { dtype, shape }, bytes))
    }
}

/// Reads a whole file.
pub(crate) fn read(path: &str) -> Result<Array> {
    let file = File::open(path).with_context(|| format!("cannot read {path}"))?;
    let mut reader = BufReader::new(file);
    let header = npyz::NpyHeader::from_reader(&mut reader)
        .with_context(|| format!("{path} is no .npy file; numpy.save writes one"))?;
    let shape = header.shape().to_vec();
    let dtype = header.dtype();
    let width = match &dtype {
        npyz::DType::Plain(kind) if kind.endianness() == npyz::Endianness::Big => {
            bail!("{path}: big-endian numbers; save x.astype(x.dtype.newbyteorder('<'))")
        }
        npyz::DType::Plain(kind) => {
            kind.num_bytes().with_context(|| format!("{path}: elements of type {kind} are no numbers"))?
        }
        _ => bail!("{path}: only plain element types"),
    };
    if ![1, 2, 4, 8].contains(&width) {
        bail!("{path}: elements of {width} bytes; there are kernels' types of 1, 2, 4 and 8");
    }
    if header.order() == npyz::Order::Fortran && shape.len() > 1 {
        bail!("{path}: in Fortran order; save np.ascontiguousarray(x)");
    }
    let count = shape
        .iter()
        .try_fold(width as u64, |a, n| a.checked_mul(*n))
        .with_context(|| format!("{path}: shape {shape:?} has more bytes than can be addressed"))?;
    let mut bytes = Vec::new();
    reader.take(count).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != count {
        bail!("{path}: {} bytes of data where {count} are needed", bytes.len());
    }
    Ok(Array { bytes, about: About { dtype, shape } })
}

/// A file that is to be written, if there is a folder for it: better known before a launch than after it.
pub(crate) fn writable(path: &str) -> Result<PathBuf> {
    let path = PathBuf::from(path);
    match path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        Some(folder) => {
            bail!("{} cannot be written: there is no folder {}", path.display(), folder.display())
        }
        None => Ok(path),
    }
}

/// Writes a whole file.
pub(crate) fn write(path: &Path, about: &About, bytes: &[u8]) -> Result<()> {
    let width = bytes.len() / about.shape.iter().product::<u64>().max(1) as usize;
    let raw = match width {
        1 => encoded(about, bytes.iter().copied())?,
        2 => encoded(about, bytes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])))?,
        4 => encoded(about, bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])))?,
        _ => {
            let word = |c: &[u8]| c.iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
            encoded(about, bytes.chunks_exact(8).map(word))?
        }
    };
    let mut file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(&raw).with_context(|| format!("cannot write {}", path.display()))
}

/// Words under the header of the array's own type, whose bits they are.
fn encoded<T: npyz::AutoSerialize>(about: &About, words: impl Iterator<Item = T>) -> Result<Vec<u8>> {
    let mut raw = Vec::new();
    let mut writer =
        npyz::WriteOptions::<T>::new().default_dtype().shape(&about.shape).writer(&mut raw).begin_nd()?;
    writer.extend(words)?;
    writer.finish()?;
    // The header names the type of the words; put the real one in its place. Both have the same length.
    let wanted = about.dtype.descr();
    let own = T::default_dtype().descr();
    let at = raw.windows(own.len()).take(256).position(|w| w == own.as_bytes());
    if let (Some(at), true) = (at, own.len() == wanted.len()) {
        raw[at..at + own.len()].copy_from_slice(wanted.as_bytes());
    }
    Ok(raw)
}
