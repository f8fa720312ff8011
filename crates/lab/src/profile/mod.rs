//! Profiles: from a profiler's counters to what holds a kernel back, and what to try next.
//!
//! Data flows one way: `ncu` writes a [`Capture`], a [`Registry`] of the architecture turns its columns into typed
//! [`Values`], [`diagnose`] walks the decision tree and gives [`Insight`]s, and [`gate()`] gives a verdict. Where there are
//! no counters, [`statics`] and [`simulated`] say what can be said without them.

mod capture;
mod csv;
mod gate;
mod insight;
mod knob;
mod metric;
mod ncu;
mod number;
mod record;
mod roofline;
mod session;
pub mod simulated;
pub mod statics;
mod tree;
mod values;

pub use capture::{Capture, Form, Launch};
pub use gate::{GATE, gate};
pub use insight::{Bottleneck, Evidence, Insight};
pub use knob::{Direction, Hint, Knob, hints};
pub use metric::{Metric, Need, Registry, Stall, Unit};
pub use ncu::{Collected, Ncu, Request, Unprofiled};
pub use record::{PROFILE_SCHEMA, ProfileRow, save};
pub use roofline::{Roofline, Work};
pub use session::{Session, stem};
pub use tree::diagnose;
pub use values::Values;
