//! `evosdpa apply`: winners of a tune become rows of the user's tuned table.

use std::fmt::Write;

use anyhow::Context;
use evosdpa::tuned::{Elites, LeftOut, Merged, Unconfirmed, read_table, update_table, user_table_path};
use evosdpa_lab::machine::Environment;
use serde::Serialize;

use crate::{
    Status,
    args::Apply,
    command::{read_text, registry},
    output,
};

#[derive(Serialize)]
struct ApplyRow {
    table: String,
    written: bool,
    device: Option<String>,
    arch: String,
    merged: Vec<Merged>,
    left_out: Vec<LeftOut>,
}

pub(crate) fn run(args: Apply) -> anyhow::Result<Status> {
    let registry = registry(&args.kernel_path)?;
    let file = args.elite.display().to_string();
    let text = read_text(&args.elite)?;
    let unconfirmed = if args.force { Unconfirmed::Take } else { Unconfirmed::LeaveOut };
    let elites = Elites::parse(&text, &file, &registry, unconfirmed)?;
    if elites.rows.is_empty() {
        let whys: Vec<String> = elites
            .left_out
            .iter()
            .map(|left| format!("{}: not {}: {}", left.shape, left.kernel, left.why))
            .collect();
        let hint = if args.force { "" } else { "\n--force takes what was not confirmed" };
        anyhow::bail!("nothing of {file} can be applied:\n  {}{hint}", whys.join("\n  "));
    }
    let path = args.table.or_else(user_table_path).context(
        "there is no place for the user's table: EVOSDPA_TUNED is empty, or HOME is not set; use --table FILE",
    )?;
    let merged = if args.dry_run {
        elites.merge_into(&mut read_table(&path)?.unwrap_or_default())
    } else {
        update_table(&path, |table| Ok(elites.merge_into(table)))?
    };
    let row = ApplyRow {
        table: path.display().to_string(),
        written: !args.dry_run,
        device: elites.device,
        arch: elites.arch.to_string(),
        merged,
        left_out: elites.left_out,
    };
    if args.json {
        output::print_json("apply", &Environment::look(None), &[row])?;
    } else {
        output::print(&page(&row))?;
    }
    Ok(Status::Passed)
}

fn page(row: &ApplyRow) -> String {
    let mut page = String::new();
    for merged in &row.merged {
        let dtypes =
            if merged.dtypes.is_empty() { String::new() } else { format!(" {}", merged.dtypes.join(",")) };
        let tunables: Vec<String> =
            merged.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let replaced = match &merged.replaced {
            Some(before) => format!(", in place of {before}"),
            None => String::new(),
        };
        let _ =
            writeln!(page, "{}{dtypes}: {}[{}]{replaced}", merged.shape, merged.kernel, tunables.join(" "));
    }
    for left in &row.left_out {
        let _ = writeln!(page, "{}: not {}: {}", left.shape, left.kernel, left.why);
    }
    let done = if row.written { "in" } else { "would be in" };
    let device = row.device.as_deref().unwrap_or("any device");
    let _ = writeln!(page, "{} rows for {device} ({}) {done} {}", row.merged.len(), row.arch, row.table);
    page
}
