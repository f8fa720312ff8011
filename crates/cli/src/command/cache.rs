//! `evosdpa cache`: what has been compiled and kept.

use std::time::SystemTime;

use evosdpa_cuda::{Cache as KernelCache, CacheEntry};
use evosdpa_lab::machine::Environment;
use serde_json::json;

use crate::{Status, args::Cache, output};

pub(crate) fn run(args: Cache) -> anyhow::Result<Status> {
    let cache = KernelCache::open_default()?;
    let folder = cache.folder().display().to_string();
    if args.clear {
        let removed_bytes = cache.size_bytes()?;
        let removed = cache.clear()?;
        if args.json {
            let row = json!({"folder": folder, "removed": removed, "removed_bytes": removed_bytes});
            output::print_json("cache", &Environment::look(None), &[row])?;
        } else {
            output::print(&format!("removed {removed} kernels, {}, from {folder}\n", size(removed_bytes)))?;
        }
        return Ok(Status::Passed);
    }
    let entries = cache.entries()?;
    if args.json {
        let rows: Vec<_> = entries.iter().map(as_json).collect();
        output::print_json("cache", &Environment::look(None), &rows)?;
        return Ok(Status::Passed);
    }
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let summary = format!(
        "{} kernels, {} of at most {}, in {folder}\n",
        entries.len(),
        size(total),
        size(cache.limit_bytes())
    );
    if entries.is_empty() {
        return output::print(&summary).map(|()| Status::Passed);
    }
    let rows = entries.iter().map(|entry| {
        let key = entry.key.chars().take(12).collect();
        vec![entry.label.clone(), key, size(entry.bytes), age(entry.used)]
    });
    let table = output::table(&["variant", "key", "size", "last used"], 2, rows.collect());
    output::print(&format!("{table}\n{summary}"))?;
    Ok(Status::Passed)
}

fn as_json(entry: &CacheEntry) -> serde_json::Value {
    let used = entry.used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    json!({"label": entry.label, "key": entry.key, "size_bytes": entry.bytes, "used_unix_s": used})
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{:.0} kB", bytes as f64 / 1e3),
        _ => format!("{:.0} MB", bytes as f64 / 1e6),
    }
}

fn age(used: SystemTime) -> String {
    // A clock that was set back makes entries of the future: they are as new as can be.
    match used.elapsed().map_or(0, |age| age.as_secs()) {
        0..120 => "just now".to_owned(),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h ago", seconds / 3600),
        seconds => format!("{} days ago", seconds / 86_400),
    }
}
