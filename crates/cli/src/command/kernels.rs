//! `evosdpa kernels`: what there is, and what grew from what.

use evosdpa_lab::machine::Environment;

use crate::{Found, args::Kernels, output};

pub(crate) fn run(args: Kernels) -> anyhow::Result<Found> {
    let device = args.common.open()?;
    let kernels = device.kernels();
    if args.common.json {
        output::print_json("kernels", &Environment::look(args.common.thread_count()), &kernels)?;
        return Ok(Found::NothingWrong);
    }
    let rows = kernels.iter().map(|kernel| {
        let parent = kernel.parent.unwrap_or("–").to_owned();
        vec![kernel.name.to_owned(), parent, kernel.summary.to_owned(), kernel.changed.to_owned()]
    });
    output::print(&output::table(&["kernel", "parent", "what it is", "what it changed"], 9, rows.collect()))?;
    Ok(Found::NothingWrong)
}
