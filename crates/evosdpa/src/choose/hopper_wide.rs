//! `hopper_wide`, heads of more than 256 columns. Measured on an H200: docs/log/hopper.md.

use super::{look::Look, settings::Settings};

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let alone = look.facts.seq_q <= 64;
    settings.decide(
        "cluster",
        &[("CLUSTER", if alone { 1 } else { 2 })],
        if alone {
            "one Q tile for each head: there is nobody to share its keys with"
        } else {
            "two CTAs fetch keys and values together: 64 rows alone ask more of L2 than it has"
        },
    );
}

pub(super) fn kinds(look: &Look<'_>, value: &dyn Fn(&str) -> i64, settings: &mut Settings) {
    let few_keys = look.few_keys();
    let whole = !few_keys && i64::from(look.facts.seq_kv) % value("BLOCK_N") == 0;
    let why = if whole { "whole KV tiles: no masks" } else { "code for any mask and any number of keys" };
    settings.decide("mask code", &[("WHOLE_TILES", i64::from(whole))], why);
    look.decide_precision(!whole, settings);
}
