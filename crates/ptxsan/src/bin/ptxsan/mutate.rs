//! `ptxsan mutate`: is a missing synchronisation noticed?

use crate::options::RunArgs;
use crate::session::{Session, entry_of};
use crate::{input, say};
use anyhow::Result;
use ptxsan::mutate::Scene;
use ptxsan::{Module, Options};

pub(crate) fn mutate(args: &RunArgs, json: bool) -> Result<bool> {
    let module = input::load(&args.input, args.launch.entry.as_deref().into_iter())?;
    let entry = entry_of(&module, &args.launch)?;
    let run = |module: &Module, options: &Options| {
        let mut session = Session::new(module)?;
        let (outcome, _) = session.launch(args, &args.launch, options)?;
        anyhow::Ok((outcome, session.contents()?))
    };
    let scenes = [Scene { name: args.input.file.display().to_string(), run: Box::new(run) }];
    let score = ptxsan::mutate::score(&module, &entry, &scenes, &args.schedule.0)?;
    let (noticed, matter) = score.counts();
    if json {
        let document = serde_json::json!({
            "schema": "ptxsan.mutate/2",
            "noticed": noticed,
            "matter": matter,
            "unmutated_findings": score.unmutated_findings,
            "rows": score.deletions,
        });
        say(&format!("{document}\n"))?;
    } else {
        say(&format!("{score}\n"))?;
    }
    // A kernel with findings as it stands says nothing of its deletions.
    Ok(score.unmutated_findings.is_empty() && noticed == matter)
}
