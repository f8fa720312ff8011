//! Which device: the one place where its name is read and written.

use std::{fmt, str::FromStr};

use evosdpa_core::error::nearest;
use serde::{Deserialize, Serialize};

use crate::Error;

/// A place to run kernels, by name: `cpu`, `sim`, `cuda` (the first GPU) or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DeviceId {
    /// The machine's own processor.
    Cpu,
    /// The simulator: CUDA kernels on the machine's own processor.
    Sim,
    /// The GPU of this number, as the driver counts them from 0.
    Cuda(usize),
}

impl DeviceId {
    /// What may be written.
    pub const ALLOWED: [&'static str; 4] = ["cpu", "cuda", "cuda:N", "sim"];
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Sim => f.write_str("sim"),
            // Records have always called the first one so.
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let ordinal = |text: &str| match text.strip_prefix("cuda")? {
            "" => Some(0),
            number => number.strip_prefix(':')?.parse().ok(),
        };
        match text {
            "cpu" => Ok(Self::Cpu),
            "sim" => Ok(Self::Sim),
            other => ordinal(other).map(Self::Cuda).ok_or_else(|| unknown(other, &Self::ALLOWED)),
        }
    }
}

impl From<DeviceId> for String {
    fn from(id: DeviceId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for DeviceId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// A name that is no device, or none that can be used here.
pub fn unknown(name: &str, allowed: &[&str]) -> Error {
    Error::Problem(evosdpa_core::Error::UnknownName {
        kind: "device",
        name: name.to_owned(),
        // By its letters `gpu` is nearest to `cpu`, which is the last thing meant.
        nearest: if name == "gpu" { Some("cuda".to_owned()) } else { nearest(name, allowed.iter().copied()) },
        allowed: allowed.join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_being_written_and_read() {
        for (id, name) in [
            (DeviceId::Cpu, "cpu"),
            (DeviceId::Sim, "sim"),
            (DeviceId::Cuda(0), "cuda"),
            (DeviceId::Cuda(11), "cuda:11"),
        ] {
            assert_eq!((id.to_string().as_str(), name.parse::<DeviceId>().unwrap()), (name, id));
            let json = serde_json::to_string(&id).unwrap();
            assert_eq!((json.as_str(), serde_json::from_str(&json).unwrap()), (&*format!("\"{name}\""), id));
        }
        assert_eq!("cuda:0".parse::<DeviceId>().unwrap(), DeviceId::Cuda(0));
        for wrong in ["", "cud", "cuda:", "cuda:-1", "cuda1", "CPU", "cuda:99999999999999999999"] {
            let error = wrong.parse::<DeviceId>().unwrap_err().to_string();
            assert!(error.contains("allowed: cpu, cuda, cuda:N, sim"), "{error}");
        }
        let error = "gpu".parse::<DeviceId>().unwrap_err().to_string();
        assert!(error.contains("did you mean `cuda`"), "{error}");
    }
}
