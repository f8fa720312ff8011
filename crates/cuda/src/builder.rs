//! Variants to artifacts: compiled elsewhere before, from the cache, or compiled and put there.

use std::{sync::Arc, time::Instant};

use evosdpa_kernels::Variant;

use crate::{
    Artifact, ArtifactKind, Cache, CompileRequest, Compiled, Compiler, Device, Function, Origin, Precompiled,
    Result, toolkit::Toolkit, worker::CompilePool,
};

/// Builds variants. Needs no GPU and no driver.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    precompiled: Option<Precompiled>,
    cache: Option<Cache>,
    pool: Option<Arc<CompilePool>>,
    leave_out_lines: bool,
}

impl Builder {
    /// With the kernels that came along and the default cache, compiling in this process. Where the cache cannot be had,
    /// everything else is compiled anew.
    pub fn new() -> Result<Self> {
        let warn = |error: &crate::Error| tracing::warn!("compiled kernels are not kept: {error}");
        let cache = Cache::open_default().inspect_err(warn).ok();
        Ok(Self { precompiled: Precompiled::find()?, cache, pool: None, leave_out_lines: false })
    }

    /// With another folder of kernels that were compiled elsewhere, or none.
    pub fn with_precompiled(mut self, precompiled: Option<Precompiled>) -> Self {
        self.precompiled = precompiled;
        self
    }

    /// With another cache, or none.
    pub fn with_cache(mut self, cache: Option<Cache>) -> Self {
        self.cache = cache;
        self
    }

    /// Without source lines in what is compiled: for code that goes elsewhere, to be run and not to be profiled.
    pub fn without_lines(mut self) -> Self {
        self.leave_out_lines = true;
        self
    }

    /// Compiling in worker processes, several at once and each under a time limit.
    pub fn with_pool(mut self, pool: CompilePool) -> Self {
        self.pool = Some(Arc::new(pool));
        self
    }

    /// The cache, if there is one.
    pub fn cache(&self) -> Option<&Cache> {
        self.cache.as_ref()
    }

    /// The variant's cubin.
    pub fn build(&self, variant: &Variant) -> Result<Artifact> {
        self.make(variant, ArtifactKind::Cubin)
    }

    /// The variant's entry point on a device. What was compiled elsewhere and this driver does not take is compiled here.
    pub fn load(&self, device: &Device, variant: &Variant) -> Result<Function> {
        let artifact = self.build(variant)?;
        let module = match device.load(&artifact.code, &artifact.label) {
            Err(error) if artifact.origin == Origin::Precompiled => {
                tracing::warn!("{} is compiled here: {error}", artifact.label);
                let own = self.clone().with_precompiled(None).build(variant)?;
                device.load(&own.code, &own.label)
            }
            loaded => loaded,
        };
        module?.function(&variant.entry)
    }

    /// The variant's PTX, with line information that names its source file.
    pub fn ptx(&self, variant: &Variant) -> Result<Artifact> {
        self.make(variant, ArtifactKind::Ptx)
    }

    /// Many at once: as many in parallel as the pool has workers. Results come in the order of the variants, and one
    /// that fails does not disturb the others.
    pub fn build_all(&self, variants: &[Variant], kind: ArtifactKind) -> Vec<Result<Artifact>> {
        self.build_while(variants, kind, |_| true).into_iter().flatten().collect()
    }

    /// Like [`build_all`](Self::build_all), asking before each variant, by its index, whether to go on. What was not
    /// begun after the first no is `None`.
    pub fn build_while(
        &self,
        variants: &[Variant],
        kind: ArtifactKind,
        go_on: impl Fn(usize) -> bool + Sync,
    ) -> Vec<Option<Result<Artifact>>> {
        let threads = self.pool.as_ref().map_or(1, |pool| pool.workers()).min(variants.len()).max(1);
        let next = std::sync::atomic::AtomicUsize::new(0);
        let mut results: Vec<Option<Result<Artifact>>> = variants.iter().map(|_| None).collect();
        let slots = std::sync::Mutex::new(&mut results);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some(variant) = variants.get(i).filter(|_| go_on(i)) else { break };
                        let made = self.make(variant, kind);
                        // The lock is only held to store; nothing can panic under it.
                        slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[i] = Some(made);
                    }
                });
            }
        });
        results
    }

    fn make(&self, variant: &Variant, kind: ArtifactKind) -> Result<Artifact> {
        let start = Instant::now();
        let mut request = CompileRequest::new(variant, kind);
        if self.leave_out_lines {
            request = request.without_lines();
        }
        let artifact = |code: Vec<u8>, log: String, key: &str, origin: Origin| Artifact {
            label: request.label.clone(),
            entry: variant.entry.clone(),
            kind,
            code,
            log,
            key: key.to_owned(),
            origin,
            time: start.elapsed(),
        };
        // Before anyone looks for a compiler: what is there needs none.
        if let Some(precompiled) = &self.precompiled {
            let key = request.source_key();
            if let Some((code, log)) = precompiled.load(&key) {
                return Ok(artifact(code, log, &key, Origin::Precompiled));
            }
        }
        let key = request.key(&Toolkit::find()?.fingerprint());
        if let Some((code, log)) = self.cache.as_ref().and_then(|cache| cache.load(&key)) {
            return Ok(artifact(code, log, &key, Origin::Cache));
        }
        let Compiled { code, log, .. } = match &self.pool {
            Some(pool) => pool.compile(&request)?,
            None => Compiler::open()?.compile(&request)?,
        };
        if let Some(cache) = &self.cache
            && let Err(error) =
                cache.store(&key, &format!("{} {}", request.label, request.target), &code, &log)
        {
            // A full or read-only disk makes things slow, not wrong.
            tracing::warn!("the compiled kernel could not be cached: {error}");
        }
        Ok(artifact(code, log, &key, Origin::Compiled))
    }
}
