//! Tests that read fixtures of other crates. Not part of the packaged crate.

mod agreement;
mod resources;
mod spelling;
mod variants;
