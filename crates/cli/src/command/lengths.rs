//! `--lengths`: how long the sequences of each shape are.

use evosdpa_core::Problem;
use evosdpa_oracle::inputs::LengthFamily;

/// Those of one of so many shapes; `None` where the option was not given.
pub(crate) fn of_shape(
    given: &[LengthFamily],
    at: usize,
    shapes: usize,
) -> anyhow::Result<Option<LengthFamily>> {
    match given {
        [] => Ok(None),
        [all] => Ok(Some(*all)),
        each if each.len() == shapes => Ok(Some(each[at])),
        each => anyhow::bail!(
            "--lengths is given {} times: once for all shapes, or {shapes} times, once for each",
            each.len()
        ),
    }
}

/// The problem with room for these lengths; an error where it has none of its own, or they are not its sequences'.
pub(crate) fn fitted(problem: &Problem, lengths: Option<LengthFamily>) -> anyhow::Result<Problem> {
    let Some(lengths) = lengths.filter(|lengths| *lengths != LengthFamily::Equal) else {
        return Ok(*problem);
    };
    let own = problem.lengths();
    if !(own.packed_queries || own.packed_keys || own.used || own.used_queries) {
        anyhow::bail!("--lengths {lengths}: {problem} has no lengths of its own: add :varlen or :used");
    }
    lengths.fitted(problem).map_err(|error| anyhow::anyhow!("--lengths: {problem}: {error}"))
}
