"""Putting evosdpa in the place of torch's own function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _binding


class patch(contextlib.ContextDecorator):
    """Makes ``torch.nn.functional.scaled_dot_product_attention`` evosdpa's while it is entered.

    What evosdpa does not compute (dropout, gradients, tensors that are more than memory) goes to torch as
    before, so that a program's results and exceptions stay what they are; with ``fallback=False`` it raises instead, which
    shows what a program asks for. Who chooses among torch's backends (``torch.nn.attention.sdpa_kernel``) gets them.

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


_functions: dict[bool, Callable[..., Any]] = {}


def _function(fallback: bool) -> Callable[..., Any]:
    """One function for all patches of a kind: what is known by its identity stays known."""
    return _functions.setdefault(fallback, _made(fallback))


def _made(fallback: bool) -> Callable[..., Any]:
    import torch

    from . import _original, _torch, _window

    compiling, tensor = _torch.compiling, torch.Tensor
    flash, efficient, math, cudnn = (
        getattr(torch._C, f"_get_{name}_sdp_enabled", lambda: True) for name in ("flash", "mem_efficient", "math", "cudnn")
    )

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not (
            _original.stands()
            and isinstance(query, tensor)
            and isinstance(key, tensor)
            and isinstance(value, tensor)
            and (is_causal is False or is_causal is True)
            and (enable_gqa is False or enable_gqa is True)
            and flash()
            and efficient()
            and math()
            and cudnn()
        ):
            return _original.attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and type(dropout_p) is float and dropout_p == 0.0 and not compiling():
            window = _window.CAUSAL if is_causal else _window.FULL
            done = _torch.straight(query, key, value, scale, window, enable_gqa, False, False, False)
            if done is not None:
                return done[0]
        return _torch.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False, fallback)

    scaled_dot_product_attention.__qualname__ = "scaled_dot_product_attention"
    return scaled_dot_product_attention
