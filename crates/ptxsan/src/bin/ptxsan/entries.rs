//! `ptxsan entries`: what a file has that can be launched or set.

use crate::options::InputArgs;
use crate::{input, say};
use anyhow::Result;
use ptxsan::names::demangled;
use serde_json::{Value, json};

/// Constants of libcu++ and cooperative groups, texts of `printf` and `assert`: hundreds, and nobody sets them.
fn is_the_compilers(name: &str) -> bool {
    let libraries = ["cuda::", "cooperative_groups::", "nvcuda::", "cub::", "thrust::"];
    name.starts_with('$')
        || name.starts_with("__unnamed")
        || libraries.iter().any(|library| name.starts_with(library))
}

pub(crate) fn entries(args: &InputArgs, json: bool) -> Result<bool> {
    let module = input::load(args, std::iter::empty())?;
    let mut text = format!("target {}, PTX {}\n", module.target(), module.version());
    let (mut entries, mut refused, mut variables) = (Vec::<Value>::new(), Vec::new(), Vec::new());
    // A mangled name is shown as well: it is what profilers and drivers print.
    let symbol = |entry: &str| if demangled(entry) == entry { String::new() } else { format!(" [{entry}]") };
    for entry in module.entries() {
        let (sizes, shared) = (module.parameters(entry)?, module.static_shared_bytes(entry)?);
        let name = demangled(entry);
        let listed: Vec<String> = sizes.iter().map(|bytes| format!("{bytes} bytes")).collect();
        let takes = if listed.is_empty() {
            "no arguments".to_owned()
        } else {
            format!("arguments of {}", listed.join(", "))
        };
        text += &format!("{name}{}: {takes}; {shared} bytes of shared memory\n", symbol(entry));
        entries
            .push(json!({ "entry": entry, "name": name, "parameter_bytes": sizes, "shared_bytes": shared }));
    }
    for (entry, why) in module.refused() {
        text += &format!("{}{}: cannot be run: {why}\n", demangled(entry), symbol(entry));
        refused.push(json!({ "entry": entry, "name": demangled(entry), "why": why.to_string() }));
    }
    if entries.is_empty() && refused.is_empty() {
        text += &format!("{}\n", ptxsan::Error::NoEntries);
    }
    let mut all: Vec<(&str, u64)> = module.variables().collect();
    all.sort_unstable();
    let mut hidden = 0;
    for (variable, bytes) in all {
        if is_the_compilers(&demangled(variable)) {
            hidden += 1;
        } else {
            text += &format!("variable {}: {bytes} bytes\n", demangled(variable));
        }
        variables.push(json!({ "variable": variable, "name": demangled(variable), "size_bytes": bytes }));
    }
    if hidden > 0 {
        text += &format!("{hidden} variables of CUDA's headers and of the compiler: --json lists them\n");
    }
    if json {
        let document = json!({
            "schema": "ptxsan.entries/1",
            "target": module.target(),
            "ptx_version": module.version(),
            "entries": entries,
            "refused": refused,
            "variables": variables,
        });
        text = format!("{document}\n");
    }
    say(&text)?;
    Ok(true)
}
