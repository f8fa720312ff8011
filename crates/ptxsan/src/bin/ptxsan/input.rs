//! A file to a module: PTX as it is, CUDA source through NVRTC.

use crate::options::InputArgs;
use anyhow::{Context, Result, bail};
use ptxsan::compile::{self, CompileOptions};
use ptxsan::{Error, Module};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Reads a file, and compiles it if it is CUDA source. Templates among `entries` are instantiated.
pub(crate) fn load<'a>(input: &InputArgs, entries: impl Iterator<Item = &'a str>) -> Result<Module> {
    let text = read(&input.file)?;
    let name = input.file.display().to_string();
    let own = input.file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let options = CompileOptions {
        arch: input.arch.clone(),
        defines: input.defines.clone(),
        include: own.into_iter().map(Path::to_owned).chain(input.include.iter().cloned()).collect(),
        more: input.nvrtc.clone(),
        ..CompileOptions::default()
    };
    let loaded = compile::load(&name, &text, &options.with_instances(entries));
    Ok(match loaded {
        // It names the file itself.
        Err(Error::Rejected { .. } | Error::Compiler(_)) => loaded?,
        _ => loaded.context(name)?,
    })
}

/// Bytes of a text at most: what goes on for ever, as /dev/zero does, is noticed here.
const MAX_BYTES: u64 = 256 << 20;

/// A file of text, whatever it holds.
pub(crate) fn bytes_of(file: &Path) -> Result<Vec<u8>> {
    let name = file.display();
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|open| open.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    read.with_context(|| format!("cannot read {name}"))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!(
            "{name} is larger than {} MiB, which no source, PTX or list of suppressions is",
            MAX_BYTES >> 20
        );
    }
    Ok(bytes)
}

fn read(file: &Path) -> Result<String> {
    let name = file.display();
    let bytes = bytes_of(file)?;
    if bytes.starts_with(b"\x7fELF") {
        bail!(
            "{name} is an ELF object: give CUDA source or PTX text (`cuobjdump -ptx` takes it out of a program)"
        );
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name} is not UTF-8 text (from byte {at} on): give CUDA source or PTX text")
    })?;
    // A mark of its encoding that some editors put first is no text of the program.
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    if text.trim().is_empty() {
        bail!("{name} is empty: give CUDA source or PTX text");
    }
    Ok(text)
}
