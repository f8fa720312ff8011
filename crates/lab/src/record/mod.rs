//! Records: everything a run saw, on disk, whole at every moment.
//!
//! A run is a folder `runs/<time>-<short id>/` with one `result_<shape>.json` per finished shape (all samples), a
//! `summary.json` (the same rows without samples) and a `run.md` to read. Each file is written under another name and then
//! renamed, so a crash leaves the shapes finished so far and nothing half-written.

pub(crate) mod atomic;
pub mod catalogue;
pub mod markdown;
pub mod row;
pub mod run;

pub(crate) use atomic::write as write_whole;
pub use row::Row;
pub use run::{Run, RunStatus};
