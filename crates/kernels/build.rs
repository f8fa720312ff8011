//! Lists the files under `cuda/` and writes a table of `include_str!` calls. No compiler runs here.

use std::{
    env,
    error::Error,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("cuda");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", root.display());

    let mut files = Vec::new();
    if root.is_dir() {
        list(&root, &mut files)?;
    }
    files.sort();

    let mut table = String::from("&[\n");
    for file in &files {
        let name = file.strip_prefix(&root)?.to_str().ok_or("file names under cuda/ must be UTF-8")?;
        let path = file.to_str().ok_or("the checkout's path must be UTF-8")?;
        writeln!(table, "    ({name:?}, include_str!({path:?})),")?;
    }
    table.push_str("]\n");
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("embedded_files.rs"), table)?;
    Ok(())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if path.is_dir() {
            list(&path, files)?;
        } else if ["cu", "cuh", "h", "toml"].contains(&extension) {
            files.push(path);
        }
    }
    Ok(())
}
