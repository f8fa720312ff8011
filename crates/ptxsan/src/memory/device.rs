//! Allocations that outlive a launch.

use super::PAGE_BYTES;
use crate::error::{Error, Result};
use crate::finding::Variable;

/// The most one device may hold: hostile input must not allocate without bound.
const MAX_DEVICE_BYTES: u64 = 16 << 30;
/// Where the first allocation goes; address 0 stays invalid.
const FIRST_ADDRESS: u64 = 0x0010_0000_0000;
/// What lies below is an index into an array whose pointer is null.
const NULL_BYTES: u64 = 16 << 20;
/// Nothing lies for so far behind an allocation: an index that is wrong, but not absurd, does not hit the next one.
const RED_ZONE_BYTES: u64 = 256 << 20;

/// A handle to device memory: an address to pass to kernels, and a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Buffer {
    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// One allocation.
#[derive(Debug, Clone)]
pub(crate) struct Allocation {
    pub(crate) name: String,
    pub(crate) address: u64,
    pub(crate) data: Vec<u8>,
    /// 1 where a byte was ever written, and with something that was itself.
    pub(crate) written: Vec<u8>,
    pub(crate) is_freed: bool,
    pub(crate) is_read_only: bool,
    /// A launch must leave every byte of it written.
    pub(crate) is_output: bool,
}

impl Allocation {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.data.len() as u64
    }
}

/// All allocations of a device, by ascending address. Freed ones stay, so that their use can be named.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMemory {
    allocations: Vec<Allocation>,
    next: u64,
    total_bytes: u64,
}

impl Default for DeviceMemory {
    fn default() -> Self {
        DeviceMemory { allocations: Vec::new(), next: FIRST_ADDRESS, total_bytes: 0 }
    }
}

impl DeviceMemory {
    pub(crate) fn allocate(&mut self, name: &str, bytes: usize) -> Result<Buffer> {
        let address = self.next;
        self.place(name, address, vec![0; self.checked(bytes)?], vec![0; bytes], false)?;
        Ok(Buffer { address, bytes })
    }

    fn checked(&self, bytes: usize) -> Result<usize> {
        if self.total_bytes.saturating_add(bytes as u64) > MAX_DEVICE_BYTES {
            return Err(Error::Memory(format!(
                "{bytes} more bytes would pass the limit of {MAX_DEVICE_BYTES}: use smaller buffers"
            )));
        }
        Ok(bytes)
    }

    /// Puts a module's variable where its code expects it.
    pub(crate) fn place(
        &mut self,
        name: &str,
        address: u64,
        data: Vec<u8>,
        written: Vec<u8>,
        is_read_only: bool,
    ) -> Result<()> {
        let bytes = self.checked(data.len())?;
        self.total_bytes += bytes as u64;
        let end = (address + bytes as u64).next_multiple_of(PAGE_BYTES as u64) + RED_ZONE_BYTES;
        self.next = self.next.max(if address >= FIRST_ADDRESS { end } else { 0 });
        let at = self.allocations.partition_point(|a| a.address < address);
        let allocation = Allocation {
            name: name.to_owned(),
            address,
            data,
            written,
            is_freed: false,
            is_read_only,
            is_output: false,
        };
        self.allocations.insert(at, allocation);
        Ok(())
    }

    /// The last allocation that starts at or before `address`.
    pub(crate) fn nearest(&self, address: u64) -> Option<(usize, &Allocation)> {
        let after = self.allocations.partition_point(|a| a.address <= address);
        after.checked_sub(1).map(|i| (i, &self.allocations[i]))
    }

    /// Whether these bytes stand at an address.
    pub(crate) fn holds(&self, address: u64, bytes: &[u8]) -> bool {
        self.nearest(address).is_some_and(|(_, a)| {
            let start = (address - a.address) as usize;
            a.data.get(start..start + bytes.len()) == Some(bytes)
        })
    }

    pub(crate) fn by_index_mut(&mut self, index: usize) -> &mut Allocation {
        &mut self.allocations[index]
    }

    fn range(&mut self, buffer: Buffer, offset: usize, bytes: usize) -> Result<(&mut Allocation, usize)> {
        let end = offset.checked_add(bytes).filter(|end| *end <= buffer.bytes);
        if end.is_none() {
            return Err(Error::Memory(format!(
                "bytes {offset}..+{bytes} are outside a buffer of {}",
                buffer.bytes
            )));
        }
        let index = self.nearest(buffer.address).map(|(i, _)| i);
        match index.map(|i| &mut self.allocations[i]) {
            Some(a) if a.is_freed => Err(Error::Memory(format!("buffer `{}` was freed", a.name))),
            Some(a) if buffer.address + buffer.bytes as u64 <= a.end() => {
                let start = (buffer.address - a.address) as usize + offset;
                Ok((a, start))
            }
            _ => Err(Error::Memory(format!("no buffer at {:#x}", buffer.address))),
        }
    }

    pub(crate) fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        let (allocation, start) = self.range(buffer, offset, bytes.len())?;
        allocation.data[start..start + bytes.len()].copy_from_slice(bytes);
        allocation.written[start..start + bytes.len()].fill(1);
        Ok(())
    }

    pub(crate) fn read(&mut self, buffer: Buffer, offset: usize, bytes: usize) -> Result<Vec<u8>> {
        let (allocation, start) = self.range(buffer, offset, bytes)?;
        Ok(allocation.data[start..start + bytes].to_vec())
    }

    pub(crate) fn set_read_only(&mut self, buffer: Buffer, is_read_only: bool) -> Result<()> {
        self.range(buffer, 0, 0)?.0.is_read_only = is_read_only;
        Ok(())
    }

    pub(crate) fn set_output(&mut self, buffer: Buffer, is_output: bool) -> Result<()> {
        self.range(buffer, 0, 0)?.0.is_output = is_output;
        Ok(())
    }

    /// Outputs with bytes that nothing wrote: the first of them, and how many there are.
    pub(crate) fn unwritten_outputs(&self) -> impl Iterator<Item = (Variable, u64)> + '_ {
        self.allocations.iter().filter(|a| a.is_output && !a.is_freed).filter_map(|a| {
            let first = a.written.iter().position(|flag| *flag != 1)?;
            let count = a.written.iter().filter(|flag| **flag != 1).count() as u64;
            Some((Variable::new(a.name.clone(), "global", first as u64, a.data.len() as u64), count))
        })
    }

    pub(crate) fn free(&mut self, buffer: Buffer) -> Result<()> {
        self.range(buffer, 0, 0)?.0.is_freed = true;
        Ok(())
    }

    /// The buffer that an address lies in.
    pub(crate) fn variable(&self, address: u64) -> Option<Variable> {
        let (_, a) = self.nearest(address).filter(|(_, a)| address < a.end())?;
        Some(Variable::new(a.name.clone(), "global", address - a.address, a.data.len() as u64))
    }

    /// ` (name+offset)` of a valid address.
    pub(crate) fn locate(&self, address: u64) -> String {
        self.variable(address).map_or_else(String::new, |v| format!(" ({}+{})", v.name, v.offset_bytes))
    }

    /// Says in words where an address lies.
    pub(crate) fn describe(&self, address: u64, bytes: u64) -> String {
        let next = self.allocations.iter().find(|a| a.address > address);
        let before = next.map_or(u64::MAX, |a| a.address - address);
        match self.nearest(address) {
            _ if address < NULL_BYTES => format!("{address} bytes from a null pointer"),
            Some((_, a)) if a.is_freed && address < a.end() => {
                format!("inside `{}` ({} bytes), which was freed", a.name, a.data.len())
            }
            Some((_, a)) if address < a.end() => {
                let past = address + bytes - a.end().min(address + bytes);
                format!("{past} of {bytes} bytes past the end of `{}` ({} bytes)", a.name, a.data.len())
            }
            Some((_, a)) if address - a.end() < 1 << 30 && address - a.end() <= before => {
                format!("{} bytes past the end of `{}` ({} bytes)", address - a.end(), a.name, a.data.len())
            }
            _ => match next.filter(|_| before < 1 << 30) {
                Some(a) => format!("{before} bytes before `{}`", a.name),
                None => "near no allocation".into(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_and_freed_buffers_are_kept() {
        let mut memory = DeviceMemory::default();
        let a = memory.allocate("a", 10).unwrap();
        let b = memory.allocate("b", 10).unwrap();
        assert!(b.address() >= a.address() + PAGE_BYTES as u64);
        memory.write(a, 8, &[1, 2]).unwrap();
        assert_eq!(memory.read(a, 7, 3).unwrap(), [0, 1, 2]);
        assert!(memory.write(a, 9, &[1, 2]).is_err());
        assert!(memory.read(a, usize::MAX, 2).is_err());
        memory.free(a).unwrap();
        assert!(memory.read(a, 0, 1).is_err());
        assert!(memory.describe(a.address(), 4).contains("freed"));
        assert_eq!(memory.describe(32, 4), "32 bytes from a null pointer");
        assert_eq!(memory.describe(NULL_BYTES, 4), "near no allocation");
        assert!(memory.allocate("huge", usize::MAX / 2).is_err());
    }
}
