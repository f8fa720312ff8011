"""Putting evosdpa in the place of torch's own function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _binding


class patch(contextlib.ContextDecorator):
    """Makes ``torch.nn.functional.scaled_dot_product_attention`` evosdpa's while it is entered.

    What evosdpa does not compute (dropout, gradients, tensors that are more than memory) goes to torch as
    before, so that a program's results and exceptions stay what they are; with ``fallback=False`` it raises instead, which
    shows what a program asks for. Who leaves out one of the device's backends (``torch.nn.attention.sdpa_kernel``) gets the others. Calls of
    float32 with fewer than 4,096 multiply-adds a GEMM stay torch's, bit for bit: there is no time to be gained.

    The change is seen by the whole process, in every thread, by all code that calls the function through its module; a
    name imported before (``from torch.nn.functional import scaled_dot_product_attention``) stays what it was, and one
    imported meanwhile is torch's again afterwards. Patches may be left in any order.

    >>> import pytest; torch = pytest.importorskip("torch")
    >>> import evosdpa
    >>> x = torch.randn(1, 4, 16, 32)
    >>> with evosdpa.patch():
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(x, x, x), atol=1e-5)
    True
    """

    def __init__(self, *, fallback: bool = True) -> None:
        self.fallback = fallback
        self._tokens: list[object] = []

    def __enter__(self) -> patch:
        if _binding.torch_side is None:
            raise ImportError("evosdpa.patch() changes torch, which is not installed (or EVOSDPA_TORCH=0 is set)")
        from . import _original

        token = object()
        self._tokens.append(token)
        _original.enter(token, _function(self.fallback))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from . import _original

        _original.leave(self._tokens.pop())


#: Multiply-adds of QKᵀ from which on a call in float32 is ours. Below, torch is as fast; and scores of hundreds, which only tests have,
#: make two correct float32 results differ by more than the 1e-5 at which programs compare.
_WORTHWHILE = 4096
#: Scales that are ours. torch multiplies after it has hidden keys: of what is zero in float32, or overflows, it may make NaN.
_SCALES_START, _SCALES_END = 2.0**-126, 1e9

_functions: dict[bool, Callable[..., Any]] = {}


def _function(fallback: bool) -> Callable[..., Any]:
    """One function for all patches of a kind: what is known by its identity stays known."""
    return _functions.setdefault(fallback, _made(fallback))


def _made(fallback: bool) -> Callable[..., Any]:
    import torch

    from . import _original, _torch

    compiling, tensor, float32, strict = _torch.compiling, torch.Tensor, torch.float32, not fallback
    exporting = getattr(torch.compiler, "is_exporting", _never)  # 2.7 on
    numbers = frozenset((float, int))
    overridden, watched = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    plain = frozenset((torch.Tensor, torch.nn.Parameter))
    flash, efficient, math, cudnn = (
        getattr(torch._C, f"_get_{name}_sdp_enabled", lambda: True) for name in ("flash", "mem_efficient", "math", "cudnn")
    )

    def has_no_more(query: Any) -> bool:
        """Whether a device has the first two alone, as a CPU; who watches would see the question."""
        return not compiling() and overridden() == 0 and bool(query.is_cpu)

    def ours(
        _given: tuple[Any, ...],
        _named: dict[str, Any],
        /,
        query: Any = None,
        key: Any = None,
        value: Any = None,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        *more: Any,
        scale: Any = None,
        enable_gqa: Any = False,
        **unknown: Any,
    ) -> Any:
        if (
            not _original.stands()
            # Who derives from tensors would see every attribute that is asked for.
            or not (type(query) in plain or (strict and isinstance(query, tensor)))
            or not (type(key) in plain or (strict and isinstance(key, tensor)))
            or not (type(value) in plain or (strict and isinstance(value, tensor)))
            or not (attn_mask is None or strict or _torch.is_known_mask(attn_mask))
            or not (scale is None or strict or (type(scale) in numbers and _SCALES_START <= scale < _SCALES_END))
            or not (strict or type(dropout_p) in numbers)
            or not (is_causal is False or is_causal is True)
            or not (enable_gqa is False or enable_gqa is True)
            or more
            or unknown
            or not (flash() and math() and ((efficient() and cudnn()) or has_no_more(query)))
            # What is exported is kept and run where evosdpa may not be, and by others than torch.
            or (fallback and exporting())
        ):
            return _original.as_called(_given, _named)
        if not compiling():
            if fallback and (
                overridden() > 0 or watched() > 0 or (query.dtype is float32 and _is_small(query, key))
            ):
                return _original.as_called(_given, _named)
            if type(dropout_p) is float and dropout_p == 0.0 and (attn_mask is None or (not is_causal and (strict or not query.is_cuda))):
                scores = None if attn_mask is None else (attn_mask, 0.0, 0, None, None)
                done = _torch.straight(query, key, value, scale, is_causal, enable_gqa, False, False, False, False, scores)
                if done is not None:
                    return done
        return _torch.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False, fallback)

    ours.__name__ = "scaled_dot_product_attention"  # in what Python says of wrong arguments
    ours.__qualname__ = "scaled_dot_product_attention"
    return Replacement(ours)


class Replacement:
    """Stands where torch's own function stood. That is a builtin: as an attribute of a class it is no method, and who looks one of the two
    up among functions that were kept while the other stood there, in a table of overrides for instance, finds it."""

    def __init__(self, ours: Callable[..., Any]) -> None:
        import torch

        self._ours = ours
        self._builtin = getattr(torch._C, "_nn").scaled_dot_product_attention
        self._key = hash(self._builtin)
        self.__name__ = self.__qualname__ = "scaled_dot_product_attention"
        # Where pickle finds it: who unpickles gets what stands there then.
        self.__module__ = "torch.nn.functional"
        self.__doc__ = torch.nn.functional.scaled_dot_product_attention.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._builtin)  # it has none, which Python says by an error

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._ours(given, named, *given, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._builtin or isinstance(other, Replacement)

    def __hash__(self) -> int:
        return self._key

    def __reduce__(self) -> str:
        return "scaled_dot_product_attention"

    def __repr__(self) -> str:
        return "<evosdpa's scaled_dot_product_attention>"


def _never() -> bool:
    return False


def _is_small(query: Any, key: Any) -> bool:
    if query.numel() >= _WORTHWHILE or key.is_nested or key.dim() < 2:
        return False
    return bool(query.numel() * key.size(-2) < _WORTHWHILE)
