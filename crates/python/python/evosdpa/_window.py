"""Masks as the native side takes them: keys before, keys after (-1 for no bound), aligned bottom-right or not."""

from __future__ import annotations

from typing import Any

from . import _side

Window = tuple[int, int, bool]

FULL: Window = (-1, -1, False)
CAUSAL: Window = (-1, 0, False)


def flash_window(causal: bool, window_size: Any) -> Window:
    """FlashAttention's arguments; causal leaves no key after the query. ``None`` is no bound, as in FlashAttention-4."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}; give the keys before and after, -1 for no bound") from None
    if type(left) is not int or type(right) is not int:
        left, right = (-1 if side is None else _side.whole("a side of window_size", side) for side in (left, right))
    return (left, 0 if causal else right, True)
