//! `hopper_wide`, heads of more than 256 columns: one tile for all of them. Measured on an H200: docs/log/hopper.md.

use super::{look::Look, settings::Settings};

/// Heads of more columns are its own.
pub(super) const COLUMNS_MAX_OF_OTHERS: u32 = 256;

pub(super) fn kinds(look: &Look<'_>, value: &dyn Fn(&str) -> i64, settings: &mut Settings) {
    let few_keys = look.few_keys();
    let whole = !few_keys && i64::from(look.facts.seq_kv) % value("BLOCK_N") == 0;
    let why = if whole { "whole KV tiles: no masks" } else { "code for any mask and any number of keys" };
    settings.decide("mask code", &[("WHOLE_TILES", i64::from(whole))], why);
    look.decide_precision(!whole, false, settings);
}
