//! Device memory with canaries on both sides.

use bytemuck::Pod;

use crate::{Device, DeviceBuffer, Error, Result};

/// Bytes of canary on each side; a multiple of any alignment a kernel may want.
const MARGIN_BYTES: usize = 4096;

/// A poisoned buffer between two canaries: what writes outside it is caught, and what reads outside it gets NaN.
#[derive(Debug)]
pub struct GuardedBuffer {
    name: String,
    memory: DeviceBuffer,
    bytes: usize,
}

impl GuardedBuffer {
    /// A buffer in which every 16-bit and 32-bit floating-point value is NaN, with fresh canaries.
    pub fn new(device: &Device, name: &str, bytes: usize) -> Result<Self> {
        let memory = device.alloc(2 * MARGIN_BYTES + bytes)?;
        let mut buffer = Self { name: name.to_owned(), memory, bytes };
        buffer.poison()?;
        Ok(buffer)
    }

    /// Puts poison and canaries back, before another run.
    pub fn poison(&mut self) -> Result<()> {
        let canary = canary();
        self.memory.fill_at(MARGIN_BYTES, 0xff, self.bytes)?;
        // The copies come after the filling, and it is done when they are.
        self.memory.write_at(0, &canary)?;
        self.memory.write_at(MARGIN_BYTES + self.bytes, &canary)
    }

    /// The device address of the buffer between the canaries.
    pub fn address(&self) -> u64 {
        self.memory.address() + MARGIN_BYTES as u64
    }

    /// Its size, without the canaries.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies from the host and waits for it.
    pub fn copy_from<T: Pod>(&mut self, host: &[T]) -> Result<()> {
        let host: &[u8] = bytemuck::cast_slice(host);
        self.check_size(host.len())?;
        self.memory.write_at(MARGIN_BYTES, host)
    }

    /// Copies to the host and waits for it.
    pub fn copy_to<T: Pod>(&self, host: &mut [T]) -> Result<()> {
        let host: &mut [u8] = bytemuck::cast_slice_mut(host);
        self.check_size(host.len())?;
        self.memory.read_at(MARGIN_BYTES, host)
    }

    fn check_size(&self, given_bytes: usize) -> Result<()> {
        if given_bytes == self.bytes {
            return Ok(());
        }
        Err(Error::CopySize { buffer: "guarded buffer", given_bytes, bytes: self.bytes })
    }

    /// Whether both canaries are as they were.
    pub fn check(&self) -> Result<()> {
        let (mut before, mut after) = (vec![0; MARGIN_BYTES], vec![0; MARGIN_BYTES]);
        self.memory.read_at(0, &mut before)?;
        self.memory.read_at(MARGIN_BYTES + self.bytes, &mut after)?;
        match stray_write(&before, &after) {
            None => Ok(()),
            Some((side, distance_bytes, count)) => {
                Err(Error::StrayWrite { buffer: self.name.clone(), side, distance_bytes, count })
            }
        }
    }
}

/// Side, distance of the nearest changed byte from the buffer, and how many bytes changed on both sides.
fn stray_write(before: &[u8], after: &[u8]) -> Option<(&'static str, usize, usize)> {
    let canary = canary();
    let changed = |found: &[u8]| -> Vec<usize> {
        (0..MARGIN_BYTES).filter(|i| found.get(*i) != canary.get(*i)).collect()
    };
    let (before, after) = (changed(before), changed(after));
    let count = before.len() + after.len();
    if let Some(first) = after.first() {
        return Some(("after", *first, count));
    }
    before.last().map(|last| ("before", MARGIN_BYTES - last, count))
}

/// Every 16-bit and 32-bit floating-point value in it is NaN, and every byte pair differs from its neighbours, so that
/// neither a constant nor a shifted copy goes unnoticed.
fn canary() -> Vec<u8> {
    (0..MARGIN_BYTES).map(|i| if i % 2 == 1 { 0xff } else { 0x81 | ((i * 37 / 2) as u8 & 0x7e) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_canary_is_nan_in_every_format() {
        for pair in canary().chunks_exact(2) {
            let bits = u16::from_le_bytes([pair[0], pair[1]]);
            // f16: exponent 0x7c00; bf16: exponent 0x7f80; NaN when the rest is not zero.
            assert!(bits & 0x7c00 == 0x7c00 && bits & 0x03ff != 0);
            assert!(bits & 0x7f80 == 0x7f80 && bits & 0x007f != 0);
        }
        for word in canary().chunks_exact(4) {
            assert!(f32::from_le_bytes([word[0], word[1], word[2], word[3]]).is_nan());
        }
    }

    #[test]
    fn a_stray_write_is_placed_and_counted() {
        let clean = canary();
        assert_eq!(stray_write(&clean, &clean), None);
        let mut after = clean.clone();
        after[6..10].fill(0);
        assert_eq!(stray_write(&clean, &after), Some(("after", 6, 4)));
        let mut before = clean.clone();
        before[MARGIN_BYTES - 2..].fill(0);
        assert_eq!(stray_write(&before, &clean), Some(("before", 1, 2)));
        // Poison itself must not look like a canary.
        assert_eq!(stray_write(&clean, &[0xff; MARGIN_BYTES]).map(|(side, ..)| side), Some("after"));
    }
}
