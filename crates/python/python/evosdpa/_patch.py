"""Putting evosdpa in the place of torch's own function."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from . import _api, _binding


class patch(contextlib.ContextDecorator):
    """Makes ``torch.nn.functional.scaled_dot_product_attention`` evosdpa's while it is entered.

    What evosdpa does not compute (a dense mask, dropout, gradients) goes to torch as before, so that a program's results
    stay what they are; with ``fallback=False`` it raises instead, which shows what a program asks for.

    The change is seen by the whole process, in every thread, by all code that calls the function through its module; a
    name imported before (``from torch.nn.functional import scaled_dot_product_attention``) stays what it was.

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
        self._before: list[Any] = []

    def __enter__(self) -> patch:
        if _binding.torch_side is None:
            raise ImportError("evosdpa.patch() changes torch, which is not installed (or EVOSDPA_TORCH=0 is set)")
        import torch.nn.functional

        fallback = self.fallback

        def scaled_dot_product_attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            return _api.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, fallback=fallback)

        self._before.append(torch.nn.functional.scaled_dot_product_attention)
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch.nn.functional

        torch.nn.functional.scaled_dot_product_attention = self._before.pop()
