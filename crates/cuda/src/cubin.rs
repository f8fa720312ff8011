//! What a cubin says about its kernels, read from the ELF file itself: a second witness beside the compiler's report.
//!
//! Attribute numbers are those that NVIDIA's `cuobjdump -elf` prints names for.

use object::{
    LittleEndian,
    elf::{self, FileHeader64},
    read::elf::{FileHeader as _, SectionHeader as _, Sym as _},
};

use crate::{Error, Result};

/// A kernel's resources as its cubin has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CubinKernel {
    /// The entry point.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Shared memory that the kernel declares, without what the system reserves.
    pub smem_static_bytes: u32,
    /// Stack per thread, callees included.
    pub stack_bytes: u32,
    /// Named barriers, where the cubin says so.
    pub barriers: Option<u32>,
    /// Bytes of parameters.
    pub parameter_bytes: Option<u32>,
}

/// A cubin's kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CubinFacts {
    /// The architecture number: 90 for sm_90a.
    pub sm: u32,
    /// The kernels, in the order of their code sections.
    pub kernels: Vec<CubinKernel>,
}

const REGISTER_COUNT: u8 = 0x2f;
const MIN_STACK_SIZE: u8 = 0x12;
const PARAMETER_SIZE: u8 = 0x19;
const BARRIER_COUNT: u8 = 0x4c;
/// The driver keeps this much of each block's shared memory on sm_90, and the section counts it.
const RESERVED_SMEM_BYTES: u64 = 1024;

impl CubinFacts {
    /// Reads a cubin.
    pub fn read(cubin: &[u8]) -> Result<Self> {
        Elf::parse(cubin).and_then(|elf| elf.facts()).ok_or_else(|| Error::Report {
            label: "cubin".to_owned(),
            problem: "not a cubin that can be read".to_owned(),
        })
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&CubinKernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
    /// Differs from `bytes.len()` for sections that take no room in the file.
    size: u64,
    info: u32,
}

struct Elf<'a> {
    flags: u32,
    sections: Vec<Section<'a>>,
    /// By number.
    symbols: Vec<&'a str>,
}

impl<'a> Elf<'a> {
    /// 64-bit little-endian ELF for the CUDA machine; `None` for anything else, and for a file that is not whole: the driver
    /// reads as far as the headers say.
    fn parse(file: &'a [u8]) -> Option<Self> {
        let header = FileHeader64::<LittleEndian>::parse(file).ok()?;
        let endian = header.endian().ok()?;
        if header.e_machine(endian) != elf::EM_CUDA {
            return None;
        }
        // The program headers are not needed here, but a file that ends before them is no whole cubin.
        header.program_headers(endian, file).ok()?;
        let table = header.sections(endian, file).ok()?;
        let text = |bytes: &'a [u8]| std::str::from_utf8(bytes).ok();
        let mut sections = Vec::new();
        for section in table.iter() {
            sections.push(Section {
                name: text(table.section_name(endian, section).ok()?)?,
                bytes: section.data(endian, file).ok()?,
                size: section.sh_size(endian),
                info: section.sh_info(endian),
            });
        }
        let symbols = table.symbols(endian, file, elf::SHT_SYMTAB).ok()?;
        let names = symbols.iter().map(|symbol| text(symbol.name(endian, symbols.strings()).ok()?));
        Some(Self { flags: header.e_flags(endian), symbols: names.collect::<Option<_>>()?, sections })
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    fn facts(&self) -> Option<CubinFacts> {
        let sm = self.sm();
        let shared_attributes =
            self.section(".nv.info").map_or(Some(Vec::new()), |section| attributes(section.bytes))?;
        // An attribute of the whole file is a pair: which symbol, which value.
        let of_symbol = |kind: u8, name: &str| {
            shared_attributes.iter().filter(|attribute| attribute.kind == kind).find_map(|attribute| {
                let symbol = *self.symbols.get(u32_at(attribute.payload, 0)? as usize)?;
                (symbol == name).then(|| u32_at(attribute.payload, 4)).flatten()
            })
        };
        let mut kernels = Vec::new();
        for section in &self.sections {
            let Some(name) = section.name.strip_prefix(".text.") else { continue };
            let own = self.section(&format!(".nv.info.{name}")).and_then(|section| attributes(section.bytes));
            // Only entry points have parameters; a function section of its own is a callee.
            let Some(own) = own else { continue };
            let value =
                |kind: u8| own.iter().find(|attribute| attribute.kind == kind).map(|found| found.value);
            // Older cubins keep the register count in the section header.
            let registers =
                of_symbol(REGISTER_COUNT, name).or_else(|| Some(section.info >> 24).filter(|n| *n > 0))?;
            let shared = self.section(&format!(".nv.shared.{name}")).map_or(0, |section| section.size);
            let reserved = if sm >= 90 { RESERVED_SMEM_BYTES } else { 0 };
            kernels.push(CubinKernel {
                name: name.to_owned(),
                registers,
                smem_static_bytes: u32::try_from(shared.saturating_sub(reserved)).ok()?,
                stack_bytes: of_symbol(MIN_STACK_SIZE, name).unwrap_or(0),
                barriers: value(BARRIER_COUNT).map(u32::from),
                parameter_bytes: value(PARAMETER_SIZE).map(u32::from),
            });
        }
        Some(CubinFacts { sm, kernels })
    }

    /// CUDA 13 moved the architecture from the lowest byte of the flags to the one above it.
    fn sm(&self) -> u32 {
        let (low, high) = (self.flags & 0xff, self.flags >> 8 & 0xff);
        if low >= 20 { low } else { high }
    }
}

struct Attribute<'a> {
    kind: u8,
    /// For attributes that fit into their header.
    value: u16,
    payload: &'a [u8],
}

fn attributes(mut bytes: &[u8]) -> Option<Vec<Attribute<'_>>> {
    /// The format whose value is a length, with the payload behind it.
    const SIZED: u8 = 4;
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (format, kind, value) = (*bytes.first()?, *bytes.get(1)?, u16_at(bytes, 2)?);
        let payload_bytes = if format == SIZED { usize::from(value) } else { 0 };
        let payload = bytes.get(4..4 + payload_bytes)?;
        found.push(Attribute { kind, value, payload });
        bytes = bytes.get(4 + payload_bytes..)?;
    }
    Some(found)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}
