"""Fused scaled-dot-product attention for PyTorch, NumPy and anything with DLPack.

>>> import numpy, evosdpa
>>> rng = numpy.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 8, 128, 64), dtype=numpy.float32) for _ in range(3))
>>> evosdpa.sdpa(q, k, v, is_causal=True).shape
(1, 8, 128, 64)

* :func:`sdpa` has the meaning of ``torch.nn.functional.scaled_dot_product_attention``.
* :func:`flash_attn_func` has FlashAttention's layout and its bottom-right causal mask.
* :func:`flash_attn_varlen_func` takes packed sequences, :func:`flash_attn_with_kvcache` a cache, contiguous or in pages.
* :func:`set_batch_invariant` makes a sequence's result the same bits whatever else is in its batch.
* :func:`patch` makes a PyTorch program use the first without changing its code.
* ``import evosdpa.transformers`` makes ``attn_implementation="evosdpa"`` known to transformers.
* :mod:`evosdpa.ptxsan` runs CUDA kernels on a CPU and finds their races.
* :func:`bench` and ``python -m evosdpa`` reach the commands of the ``evosdpa`` program.

PyTorch is bound when this package is imported, if it is installed; set ``EVOSDPA_TORCH=0`` to leave it alone.
"""

from __future__ import annotations

import atexit
import pathlib

from . import _binding, _native, ptxsan
from ._api import flash_attn_func, sdpa, set_batch_invariant
from ._bench import bench
from ._flash import flash_attn_varlen_func, flash_attn_with_kvcache
from ._native import __version__
from ._patch import patch

# Wheels bring the kernels of common problems along, compiled; a build from source has none.
_native.suggest_precompiled(str(pathlib.Path(__file__).with_name("kernels")))
_binding.bind_if_installed()
atexit.register(_native.ending)

__all__ = [
    "__version__",
    "bench",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "patch",
    "ptxsan",
    "sdpa",
    "set_batch_invariant",
]
