//! One exporter per file.

pub(super) mod csv;
pub(super) mod markdown;
pub(super) mod perfetto;
pub(super) mod strategies;
pub(super) mod t4;
