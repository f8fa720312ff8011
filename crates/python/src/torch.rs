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
    exchange::{self, Looked},
    known::Mix,
};

/// The parts of torch that a call touches, looked up once.
pub(crate) struct Torch {
    /// Of plain tensors.
    class: Py<PyType>,
    /// Each says something true while somebody watches, overrides, transforms, traces or profiles what torch does.
    watchers: Vec<Py<PyAny>>,
    is_grad_enabled: Py<PyAny>,
    /// The module that counts levels of forward differentiation.
    forward_ad: Py<PyAny>,
    threads: Py<PyAny>,
    empty_like: Py<PyAny>,
    /// Take sizes, strides and a type, and make a tensor on the CPU, or on the current GPU; `None` in versions without.
    makers: Option<[Py<PyAny>; 2]>,
    /// As [`exchange::Kind`] numbers them.
    dtypes: [Py<PyAny>; 4],
    /// Of contiguous tensors that were made before.
    forms: Mutex<HashMap<Contiguous, Arc<Form>, BuildHasherDefault<Mix>>>,
}

/// Sizes, with 0 behind the last dimension, and a type.
type Contiguous = ([i64; 4], u8);

/// Past this many forms all are made anew.
const FORMS_MAX: usize = 4096;

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// A tensor to make, as the arguments that torch takes: sizes, strides and a type.
pub(crate) struct Form(Py<PyTuple>);

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
            watchers: part("watchers")?.extract()?,
            is_grad_enabled: part("is_grad_enabled")?.unbind(),
            forward_ad: part("forward_ad")?.unbind(),
            threads: part("threads")?.unbind(),
            empty_like: part("empty_like")?.unbind(),
            makers: part("makers")?.extract()?,
            dtypes: part("dtypes")?.extract()?,
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

    /// Whether an object is a tensor and nothing derived from it.
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type().is(&self.class)
    }

    /// Whether nobody watches, overrides, transforms, traces or profiles.
    pub(crate) fn is_quiet(&self, py: Python<'_>) -> PyResult<bool> {
        for watcher in &self.watchers {
            if watcher.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        let level = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
        Ok(level.extract::<i64>()? < 0)
    }

    /// Whether tensors are memory that nobody differentiates and that is to be read as it is.
    pub(crate) fn are_memory<'a, 'py: 'a>(
        &self,
        py: Python<'py>,
        tensors: impl Iterator<Item = &'a Bound<'py, PyAny>> + Clone,
    ) -> PyResult<bool> {
        if !tensors.clone().all(|tensor| self.is_tensor(tensor)) {
            return Ok(false);
        }
        let differentiating = self.is_grad_enabled.bind(py).call0()?.is_truthy()?;
        for tensor in tensors {
            if (differentiating && tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?)
                || tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How many threads torch computes with.
    pub(crate) fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        self.threads.bind(py).call0()?.extract()
    }

    /// Strides of a new tensor that lies in memory as this one of four dimensions does.
    pub(crate) fn strides_like(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<[i64; 4]>> {
        let made = self.empty_like.bind(tensor.py()).call1((tensor,))?;
        Ok(exchange::look(&made).map(|found| found.strides))
    }

    /// Of a tensor of the type with this code.
    pub(crate) fn form(&self, py: Python<'_>, sizes: &[i64], strides: &[i64], dtype: u8) -> PyResult<Form> {
        let (sizes, strides) = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?);
        let dtype = self.dtypes[usize::from(dtype)].bind(py);
        Ok(Form((sizes, strides, dtype).into_pyobject(py)?.unbind()))
    }

    /// Of a contiguous tensor of at most four dimensions.
    pub(crate) fn contiguous(&self, py: Python<'_>, sizes: &[i64], dtype: u8) -> PyResult<Arc<Form>> {
        let mut key = ([0; 4], dtype);
        key.0[..sizes.len()].copy_from_slice(sizes);
        let known = self.forms.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(form) = known {
            return Ok(form);
        }
        let mut strides = [1; 4];
        for at in (1..sizes.len()).rev() {
            strides[at - 1] = strides[at] * sizes[at];
        }
        let form = Arc::new(self.form(py, sizes, &strides[..sizes.len()], dtype)?);
        let mut forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        if forms.len() >= FORMS_MAX {
            forms.clear();
        }
        forms.insert(key, Arc::clone(&form));
        Ok(form)
    }

    /// Memory from torch's allocator, beside another tensor; `None` when it cannot be described.
    pub(crate) fn make<'py>(
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
