//! The space of a kernel's tunables.

use std::{collections::BTreeMap, fmt};

use crate::{Error, Layer, Manifest, Result, Tunable, names::nearest};

/// How many combinations are tried before a constraint counts as satisfiable: enough for any honest manifest.
pub(crate) const SEARCH_LIMIT: usize = 1 << 16;

/// A value for every tunable of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Assignment(BTreeMap<String, i64>);

impl Assignment {
    /// A tunable's value.
    pub fn value(&self, name: &str) -> Option<i64> {
        self.0.get(name).copied()
    }

    /// Names and values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether no tunable has a value.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Gives a tunable or a kind one of its values.
    pub(crate) fn set(&mut self, kernel: &str, name: &str, value: i64, allowed: &[i64]) -> Result<()> {
        if !allowed.contains(&value) {
            let (kernel, name, allowed) = (kernel.to_owned(), name.to_owned(), allowed.to_vec());
            return Err(Error::TunableValue { kernel, name, value, allowed });
        }
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// With one more value, which is allowed.
    pub(crate) fn with(mut self, name: &str, value: i64) -> Self {
        self.0.insert(name.to_owned(), value);
        self
    }

    /// As a map, for documents.
    pub fn to_map(&self) -> BTreeMap<String, i64> {
        self.0.clone()
    }
}

impl<'a> FromIterator<(&'a str, i64)> for Assignment {
    fn from_iter<I: IntoIterator<Item = (&'a str, i64)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

/// `BLOCK_M=64 STAGES=2`, or `no tunables`.
impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no tunables");
        }
        let pairs: Vec<String> = self.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&pairs.join(" "))
    }
}

/// How many points a space has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceSize {
    /// Exactly this many.
    Exactly(usize),
    /// At least this many; counting stopped here.
    AtLeast(usize),
}

/// All combinations of a kernel's tunable values, produced one at a time.
#[derive(Clone, Copy, Debug)]
pub struct TunableSpace<'a> {
    kernel: &'a str,
    tunables: &'a [Tunable],
}

impl<'a> TunableSpace<'a> {
    pub(crate) fn new(manifest: &'a Manifest) -> Self {
        Self { kernel: &manifest.name, tunables: &manifest.tunables }
    }

    /// The tunables of one layer.
    pub fn layer(&self, layer: Layer) -> impl Iterator<Item = &'a Tunable> + use<'a> {
        self.tunables.iter().filter(move |tunable| tunable.layer == layer)
    }

    /// How many combinations there are before constraints.
    pub fn size(&self) -> u128 {
        self.tunables.iter().map(|tunable| tunable.values.len() as u128).fold(1, u128::saturating_mul)
    }

    /// Every combination, constraints or not, in the order of the manifest's values.
    pub fn unconstrained(&self) -> impl Iterator<Item = Assignment> + use<'a> {
        let tunables = self.tunables;
        let mut digits = Some(vec![0_usize; tunables.len()]);
        std::iter::from_fn(move || {
            let current = digits.as_mut()?;
            let assignment = tunables
                .iter()
                .zip(current.iter())
                .map(|(tunable, digit)| (tunable.name.clone(), tunable.values[*digit]))
                .collect();
            // Count up like an odometer, the last tunable fastest; past the end there is nothing more.
            let carried = (0..tunables.len()).rev().find(|&i| current[i] + 1 < tunables[i].values.len());
            match carried {
                Some(i) => {
                    current[i] += 1;
                    current[i + 1..].fill(0);
                }
                None => digits = None,
            }
            Some(Assignment(assignment))
        })
    }

    /// The values that some tunables are set to, checked.
    pub fn assign<'b>(&self, chosen: impl IntoIterator<Item = (&'b str, i64)>) -> Result<Assignment> {
        let mut assignment = Assignment::default();
        for (name, value) in chosen {
            self.set(&mut assignment, name, value)?;
        }
        Ok(assignment)
    }

    /// Sets one tunable.
    pub(crate) fn set(&self, assignment: &mut Assignment, name: &str, value: i64) -> Result<()> {
        if let Some(tunable) = self.tunables.iter().find(|tunable| tunable.name == name) {
            return assignment.set(self.kernel, name, value, &tunable.values);
        }
        let known: Vec<&str> = self.tunables.iter().map(|tunable| tunable.name.as_str()).collect();
        Err(Error::UnknownTunable {
            kernel: self.kernel.to_owned(),
            name: name.to_owned(),
            nearest: nearest(name, known.iter().copied()),
            known: if known.is_empty() { "none".to_owned() } else { known.join(", ") },
        })
    }

    /// Adds the default of every tunable that has no value yet.
    pub(crate) fn complete(&self, mut assignment: Assignment) -> Assignment {
        for tunable in self.tunables {
            if assignment.value(&tunable.name).is_none() {
                assignment.0.insert(tunable.name.clone(), tunable.default);
            }
        }
        assignment
    }
}
