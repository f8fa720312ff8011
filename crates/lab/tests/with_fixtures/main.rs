//! Tests that read fixtures of other crates. Not part of the packaged crate.

mod resources;
mod spelling;
mod variants;
