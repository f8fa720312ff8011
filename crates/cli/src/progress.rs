//! Progress bars, on a terminal only.

use std::{borrow::Cow, io::IsTerminal, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `steps` steps on standard error; invisible when that is not a terminal.
pub(crate) fn bar(steps: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(steps).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Says what is being done now.
pub(crate) fn say(bar: &ProgressBar, what: impl Into<Cow<'static, str>>) {
    bar.set_message(what);
}

/// Says what is worth keeping: a line of its own, on a terminal or not.
pub(crate) fn note(bar: &ProgressBar, what: &str) {
    if bar.is_hidden() {
        crate::output::tell(what);
    } else {
        bar.println(what);
    }
}
