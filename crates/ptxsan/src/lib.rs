//! ptxsan
pub mod count;
mod decode;
pub mod error;
mod hazard;
mod machine;
mod memory;
mod module;
pub mod numeric;
mod parse;
pub mod report;
pub mod tensor;
pub use error::{Error, Result};
pub use hazard::log::Kind;
pub use machine::{Arg, Device, Launch, ModuleId, Options, Schedule};
pub use memory::Buffer;
pub use module::{Module, SyncPoint};
pub use report::{Finding, Outcome, Site};
