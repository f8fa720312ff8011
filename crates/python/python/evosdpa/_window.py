"""Masks as the native side takes them: keys before, keys after (-1 for no bound), aligned bottom-right or not."""

from __future__ import annotations

Window = tuple[int, int, bool]

FULL: Window = (-1, -1, False)
CAUSAL: Window = (-1, 0, False)


def flash_window(causal: bool, window_size: tuple[int, int]) -> Window:
    """FlashAttention's arguments; causal leaves no key after the query."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}; give the keys before and after, -1 for no bound") from None
    return (left, 0 if causal else right, True)
