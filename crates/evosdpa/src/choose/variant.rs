//! A kernel's variant for a problem: the family's rules, under what the user or a tuned row sets.

use evosdpa_kernels::{Assignment, Error as Kernels, Kernel, ProblemFacts, Target, Variant};

use super::{
    ampere_f32, ampere_fwd, flash_decode, hopper_fwd, hopper_small, hopper_wide, look::Look,
    settings::Settings,
};
use crate::Error;

/// Whose rules choose the tunables and kinds of a kernel. A kernel without a family keeps the defaults of its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    AmpereF32,
    AmpereFwd,
    FlashDecode,
    HopperFwd,
    HopperSmall,
    HopperWide,
}

impl Family {
    const ALL: [(&'static str, Self); 6] = [
        ("ampere_f32", Self::AmpereF32),
        ("ampere_fwd", Self::AmpereFwd),
        ("flash_decode", Self::FlashDecode),
        ("hopper_fwd", Self::HopperFwd),
        ("hopper_small", Self::HopperSmall),
        ("hopper_wide", Self::HopperWide),
    ];

    fn of(kernel: &Kernel) -> Result<Option<Self>, Error> {
        let Some(wanted) = &kernel.manifest.family else { return Ok(None) };
        match Self::ALL.iter().find(|(name, _)| name == wanted) {
            Some((_, family)) => Ok(Some(*family)),
            None => Err(Error::UnknownFamily {
                kernel: kernel.name().to_owned(),
                family: wanted.clone(),
                known: Self::ALL.map(|(name, _)| name).join(", "),
            }),
        }
    }
}

/// The values that a problem gets, with the reasons, where these tunables are set.
pub fn settings(
    kernel: &Kernel,
    facts: &ProblemFacts,
    target: &Target,
    set: &Assignment,
) -> Result<Settings, Error> {
    let look = Look::new(facts, target);
    let mut settings = Settings::default();
    let Some(family) = Family::of(kernel)? else { return Ok(settings) };
    match family {
        Family::AmpereF32 => ampere_f32::tunables(&look, &mut settings),
        Family::AmpereFwd => ampere_fwd::tunables(&look, &mut settings),
        Family::FlashDecode => flash_decode::tunables(&look, &mut settings),
        Family::HopperFwd => hopper_fwd::tunables(&look, &mut settings),
        Family::HopperSmall => hopper_small::tunables(&look, &mut settings),
        Family::HopperWide => {}
    }
    settings.overridden_by(set);
    let tunables = settings.clone();
    // Kinds follow from the tunables as they are, whoever set them.
    let value = |name: &str| {
        let default = || kernel.manifest.tunables.iter().find(|tunable| tunable.name == name);
        let chosen = set.value(name).or_else(|| tunables.value(name));
        chosen.or_else(|| Some(default()?.default)).unwrap_or(0)
    };
    match family {
        Family::AmpereF32 => {}
        Family::AmpereFwd => ampere_fwd::kinds(&look, &mut settings),
        Family::FlashDecode => flash_decode::kinds(&look, &mut settings),
        Family::HopperFwd => hopper_fwd::kinds(&look, &value, &mut settings),
        Family::HopperSmall => hopper_small::kinds(&look, &value, &mut settings),
        Family::HopperWide => hopper_wide::kinds(&look, &value, &mut settings),
    }
    Ok(settings)
}

/// The variant of a kernel that a problem gets, where these tunables are set.
///
/// Where nothing is set and the values for the problem break a constraint of the kernel, the first values that keep them all.
pub fn variant(
    kernel: &Kernel,
    facts: &ProblemFacts,
    target: &Target,
    set: &Assignment,
) -> Result<Variant, Error> {
    // Only tunables can be set, and a wrong name is told before anything else.
    kernel.space().assign(set.iter())?;
    let settings = settings(kernel, facts, target, set)?;
    match kernel.variant(facts, target, settings.iter().chain(set.iter())) {
        Err(Kernels::Constraint { expr, why, .. }) if set.is_empty() => {
            kernel.supports(facts, target)?;
            let none = || {
                let (kernel, problem) = (kernel.name().to_owned(), facts.to_string());
                Err(Kernels::NoAssignment { kernel, problem, expr, why })
            };
            Ok(kernel.variants(facts, target).next().unwrap_or_else(none)?)
        }
        resolved => Ok(resolved?),
    }
}
