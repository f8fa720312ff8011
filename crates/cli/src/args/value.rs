//! Values of flags: what may be typed for each.

use std::{fmt, str::FromStr};

use evosdpa_lab::{
    device::{self, DeviceId},
    gate::hazards::Severity,
};

/// The mildest severity that fails; none: nothing does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailOn(pub(crate) Option<Severity>);

pub(super) fn fail_on(text: &str) -> Result<FailOn, String> {
    match text {
        "never" => Ok(FailOn(None)),
        _ => {
            text.parse().map(|severity| FailOn(Some(severity))).map_err(|error| format!("{error}, and never"))
        }
    }
}

/// Where to run, as far as that was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A GPU if there is one, else the CPU.
    Auto,
    /// No GPU, where one would only be compared with.
    None,
    /// Here.
    On(DeviceId),
}

impl FromStr for Place {
    type Err = evosdpa_lab::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            other => other.parse().map(Self::On).map_err(|_| {
                let allowed: Vec<&str> = ["auto"].into_iter().chain(DeviceId::ALLOWED).collect();
                device::id::unknown(other, &allowed)
            }),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::On(device) => device.fmt(f),
        }
    }
}

/// What a build can be for, or compared with: no CPU, which is not compiled for.
pub(super) fn compared_with(text: &str) -> Result<Place, evosdpa_lab::Error> {
    match text.parse() {
        Err(_) | Ok(Place::On(DeviceId::Cpu)) => {
            Err(device::id::unknown(text, &["auto", "none", "cuda", "cuda:N", "sim"]))
        }
        Ok(place) => Ok(place),
    }
}

pub(super) fn positive_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if seconds > 0.0 && seconds <= 1e6 {
        Ok(seconds)
    } else {
        Err("must be above 0 and at most 1000000".into())
    }
}

pub(super) fn margin(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("`{text}` is not a number"))?;
    if (0.0..1.0).contains(&share) {
        Ok(share)
    } else {
        Err("must be at least 0 and below 1, such as 0.02".into())
    }
}

pub(super) fn tunable(text: &str) -> Result<(String, i64), String> {
    let refuse = || format!("`{text}` is not NAME=VALUE with a whole number, such as BLOCK_M=64");
    let (name, value) = text.split_once('=').ok_or_else(refuse)?;
    let value = value.trim().parse().map_err(|_| refuse())?;
    Ok((name.trim().to_owned(), value))
}
