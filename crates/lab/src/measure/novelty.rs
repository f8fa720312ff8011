//! Is a call on inputs that were seen before faster than one on new inputs? Then outputs are kept by a fingerprint of the inputs.

use evosdpa_oracle::inputs::Inputs;

use super::audit::Finding;
use crate::{
    Error,
    device::{TimedKernel, Turned},
};

/// The second time is quicker if it takes less than this share of the first.
const QUICKER: f64 = 0.75;
/// Calls in between, for what is kept only when it was met several times.
const BETWEEN: usize = 3;
/// Pairs of a first look, and how many of them have to be quicker for a second.
const LOOK: (usize, usize) = (8, 7);
/// All pairs, and how many of them are a finding. With even odds, which is the most that noise can give an honest kernel, that is
/// one time in a million.
const FINDING: (usize, usize) = (32, 29);
/// Of calls that last longer than this, a single pair has to show it before more are made.
const SLOW_CALL_US: f64 = 20_000.0;

/// The set that is used.
const SET: usize = 0;

/// Looks, with inputs that no call has seen.
pub(super) fn look<'a>(
    loaded: &mut dyn TimedKernel,
    call_us: f64,
    mut unseen: impl FnMut() -> (&'a Inputs, Turned),
) -> Result<Option<Finding>, Error> {
    let is_slow = call_us > SLOW_CALL_US;
    let (pairs, enough) = if is_slow { (1, 1) } else { LOOK };
    let between = if is_slow { 0 } else { BETWEEN };
    let (mut quicker, mut firsts, mut seconds) = (0, Vec::new(), Vec::new());
    for pair in 0..FINDING.0 {
        let [before, inputs] = [unseen(), unseen()];
        // Both times are of a call after the same copying, and after a call on something else.
        let time = |loaded: &mut dyn TimedKernel| {
            loaded.refill(SET, before.0, before.1)?;
            loaded.time_alone_us(SET)?;
            loaded.refill(SET, inputs.0, inputs.1)?;
            loaded.time_alone_us(SET)
        };
        let first = time(loaded)?;
        for _ in 0..between {
            loaded.time_alone_us(SET)?;
        }
        let second = time(loaded)?;
        quicker += usize::from(second < QUICKER * first);
        firsts.push(first);
        seconds.push(second);
        if pair + 1 == pairs && quicker < enough {
            return Ok(None);
        }
    }
    let median_ns = |times: &[f64]| (1e3 * super::samples::median(times)) as u64;
    let found = || Finding::CachedByContent { new_ns: median_ns(&firsts), seen_ns: median_ns(&seconds) };
    Ok((quicker >= FINDING.1).then(found))
}
