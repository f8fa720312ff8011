//! Compiling what will be needed before it is needed, in several processes.

use std::{collections::BTreeMap, time::Duration};

use evosdpa_core::DType;
use evosdpa_cuda::{ArtifactKind, Builder, CompileRequest, worker::CompilePool};
use evosdpa_kernels::{Registry, Variant, VariantId};

use crate::Error;

/// No variant takes longer to compile.
const LIMIT: Duration = Duration::from_secs(120);

/// Compiles variants into the default cache, each once however often it is asked for.
pub(super) fn compile(
    variants: impl Iterator<Item = Variant>,
    kind: ArtifactKind,
    workers: usize,
    go_on: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Result<(), Error> {
    let different: BTreeMap<String, Variant> =
        variants.map(|variant| (CompileRequest::new(&variant, kind).source_key(), variant)).collect();
    let different: Vec<Variant> = different.into_values().collect();
    if different.len() < 2 {
        return Ok(());
    }
    let builder = Builder::new()?.with_pool(CompilePool::new(workers, LIMIT)?);
    // What failed fails again, with its reason, where it is loaded.
    let _ = builder.build_while(&different, kind, |i| go_on(i, different.len()));
    Ok(())
}

/// Whether the manifest of a kernel, given with or without tunables, lists a type.
pub(super) fn reads(registry: &Registry, name: &str, dtype: DType) -> bool {
    registry.kernel(VariantId::kernel_of(name)).is_ok_and(|kernel| kernel.manifest.dtypes.contains(&dtype))
}
