//! What torch is doing, and memory from its allocator: asked at every call, so by the shortest way there is.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    sync::{Arc, Mutex, PoisonError},
};

use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyTuple, PyType},
};

use crate::{
    Operand,
    exchange::{self, Looked},
    known::Mix,
    library::{Form, Library, Seen, contiguous, packed},
};

/// The parts of torch that a call touches, looked up once.
pub(crate) struct Torch {
    /// Of plain tensors.
    class: Py<PyType>,
    /// Each says something true while somebody overrides or profiles what torch does: nothing that its dispatcher knows of.
    overriders: Vec<Py<PyAny>>,
    /// Each says something true while somebody watches, transforms, traces or casts what torch does.
    watchers: Vec<Py<PyAny>>,
    /// Whether a tensor is memory to be read as it is.
    is_dense: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    /// What the module that counts levels of forward differentiation holds, and the object that it counts from.
    forward_ad: Py<PyDict>,
    no_level: Py<PyAny>,
    threads: Py<PyAny>,
    empty_like: Py<PyAny>,
    /// Take sizes, strides and a type, and make a tensor on the CPU, or on the current GPU; `None` in versions without.
    makers: Option<[Py<PyAny>; 2]>,
    /// As [`exchange::Kind`] numbers them.
    dtypes: [Py<PyAny>; 4],
    /// Makes a guard for tensors, or `None` in versions without.
    guard: Py<PyAny>,
    guards: Mutex<HashMap<Kindred, Guard, BuildHasherDefault<Mix>>>,
    /// Of contiguous tensors that were made before.
    forms: Mutex<HashMap<Contiguous, Arc<Form>, BuildHasherDefault<Mix>>>,
}

/// Says of tensors whether torch's dispatcher would do with them what it would have done with those it was made for: whether they are
/// plain memory that nobody differentiates, and nobody watches, transforms, traces or casts. One call, for ten that look at each.
struct Guard {
    check: Option<Py<PyAny>>,
    made: u32,
}

/// A guard is made anew when torch's state has changed for good (`inference_mode` for `no_grad`), but not for ever in turns.
const GUARDS_MADE_MAX: u32 = 64;

/// What guards are kept by: a byte for the type and dimensions of each tensor, 0 behind the last, and the GPU.
type Kindred = (u64, Option<usize>);

/// Sizes, with 0 behind the last dimension, and a type.
type Contiguous = ([i64; 4], u8);

/// Past this many forms all are made anew.
const FORMS_MAX: usize = 4096;

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// Takes torch's DLPack interface and its functions; says whether they can be used.
    pub(crate) fn bind(exchange: &Bound<'_, PyAny>, parts: &Bound<'_, PyDict>) -> PyResult<bool> {
        let py = exchange.py();
        if !exchange::take(exchange)? {
            return Ok(false);
        }
        let part = |name: &str| parts.as_any().get_item(name);
        let torch = Self {
            class: part("class")?.extract()?,
            overriders: part("overriders")?.extract()?,
            watchers: part("watchers")?.extract()?,
            is_dense: part("is_dense")?.unbind(),
            is_grad_enabled: part("is_grad_enabled")?.unbind(),
            forward_ad: part("forward_ad")?.extract()?,
            no_level: part("no_level")?.unbind(),
            threads: part("threads")?.unbind(),
            empty_like: part("empty_like")?.unbind(),
            makers: part("makers")?.extract()?,
            dtypes: part("dtypes")?.extract()?,
            guard: part("guard")?.unbind(),
            guards: Mutex::default(),
            forms: Mutex::default(),
        };
        // A second one would be the same.
        let _ = TORCH.set(py, torch);
        Ok(true)
    }

    /// Once it is bound.
    pub(crate) fn bound(py: Python<'_>) -> Option<&Self> {
        TORCH.get(py)
    }

    /// The part of [`Library::is_plain`] that guards stand for.
    #[cold]
    fn look_at(&self, tensors: &[&Bound<'_, PyAny>]) -> PyResult<bool> {
        let py = tensors[0].py();
        for watcher in &self.watchers {
            if watcher.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        let differentiating = self.is_grad_enabled.bind(py).call0()?.is_truthy()?;
        for tensor in tensors {
            if (differentiating && tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?)
                || !self.is_dense.bind(py).call1((tensor,))?.is_truthy()?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Strides of a new tensor that lies in memory as this one of four dimensions does.
    fn strides_like(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<[i64; 4]>> {
        let made = self.empty_like.bind(tensor.py()).call1((tensor,))?;
        Ok(exchange::look(&made).map(|found| found.strides))
    }
}

impl Library for Torch {
    fn has_made(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type().is(&self.class)
    }

    fn look(&self, object: &Bound<'_, PyAny>) -> Option<Looked> {
        self.has_made(object).then(|| exchange::look(object))?
    }

    fn is_plain(&self, seen: &Seen<'_, '_>) -> PyResult<bool> {
        let (tensors, looked) = (seen.tensors(), seen.looked());
        let py = tensors[0].py();
        for overrider in &self.overriders {
            if overrider.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        // -1 outside of all levels.
        let level = self.forward_ad.bind(py).get_item(intern!(py, "_current_level"))?;
        if !level.is_some_and(|level| level.is(&self.no_level)) {
            return Ok(false);
        }
        let kindred = looked.iter().fold(0u64, |kindred, found| {
            // Up to four dimensions.
            kindred << 8 | (found.kind as u64) << 3 | found.dimensions as u64
        });
        let kindred: Kindred = (kindred, looked[0].gpu);
        let known = self.guards.lock().unwrap_or_else(PoisonError::into_inner).get(&kindred).map(|guard| {
            let check = guard.check.as_ref().map(|check| check.clone_ref(py));
            (check, guard.made)
        });
        if let Some((Some(check), _)) = &known
            && check.bind(py).call1(PyTuple::new(py, tensors)?)?.is_truthy()?
        {
            return Ok(true);
        }
        if !self.look_at(tensors)? {
            return Ok(false);
        }
        let (known, made) = known.unwrap_or((None, 0));
        if made < GUARDS_MADE_MAX {
            let check: Option<Py<PyAny>> =
                self.guard.bind(py).call1(PyTuple::new(py, tensors)?)?.extract()?;
            // There is none while gradients are wanted, for instance: the one before is still good for others.
            let guard = Guard { check: check.or(known), made: made + 1 };
            self.guards.lock().unwrap_or_else(PoisonError::into_inner).insert(kindred, guard);
        }
        Ok(true)
    }

    fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        self.threads.bind(py).call0()?.extract()
    }

    fn strides(
        &self,
        queries: &Bound<'_, PyAny>,
        q: &Operand,
        shape: [i64; 4],
        by_token: bool,
        gpu: Option<usize>,
    ) -> PyResult<Option<[i64; 4]>> {
        // As torch's own attention makes it: as the queries lie, and contiguous on a CPU where values are of another head dimension.
        if !by_token && shape == q.shape {
            return self.strides_like(queries);
        }
        let by_sequence = q.strides[1] < q.strides[2];
        Ok(Some(packed(shape, by_token || (by_sequence && gpu.is_some()))))
    }

    fn form(&self, py: Python<'_>, sizes: &[i64], strides: &[i64], dtype: u8) -> PyResult<Form> {
        let (sizes, strides) = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?);
        let dtype = self.dtypes[usize::from(dtype)].bind(py);
        Ok(Form((sizes, strides, dtype).into_pyobject(py)?.unbind()))
    }

    // Kept from the first such tensor on.
    fn contiguous(&self, py: Python<'_>, sizes: &[i64], dtype: u8) -> PyResult<Arc<Form>> {
        let mut key = ([0; 4], dtype);
        key.0[..sizes.len()].copy_from_slice(sizes);
        let known = self.forms.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(form) = known {
            return Ok(form);
        }
        let form = Arc::new(self.form(py, sizes, &contiguous(sizes)[..sizes.len()], dtype)?);
        let mut forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        if forms.len() >= FORMS_MAX {
            forms.clear();
        }
        forms.insert(key, Arc::clone(&form));
        Ok(form)
    }

    // From torch's allocator.
    fn make<'py>(
        &self,
        form: &Form,
        beside: &Bound<'py, PyAny>,
        gpu: Option<usize>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Looked)>> {
        let py = beside.py();
        let form = form.0.bind(py);
        if let Some(makers) = &self.makers {
            let made = makers[usize::from(gpu.is_some())].bind(py).call(form, None)?;
            match exchange::look(&made) {
                Some(found) if found.gpu == gpu => return Ok(Some((made, found))),
                // Another GPU is the current one.
                _ => {}
            }
        }
        let options = PyDict::new(py);
        options.set_item(intern!(py, "dtype"), form.get_item(2)?)?;
        let shape = (form.get_item(0)?, form.get_item(1)?);
        let made = beside.call_method(intern!(py, "new_empty_strided"), shape, Some(&options))?;
        Ok(exchange::look(&made).map(|found| (made, found)))
    }
}
