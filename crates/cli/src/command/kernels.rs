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
    let rows = kernels.into_iter().map(|kernel| {
        let parent = kernel.parent.unwrap_or_else(|| "–".to_owned());
        vec![kernel.name, parent, kernel.summary, kernel.changed]
    });
    output::print(&output::table(&["kernel", "parent", "what it is", "what it changed"], 9, rows.collect()))?;
    Ok(Found::NothingWrong)
}
