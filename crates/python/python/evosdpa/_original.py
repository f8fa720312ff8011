"""torch's own attention, wherever :class:`evosdpa.patch` has put it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit import _builtins

Attention = Callable[..., Any]

_lock = threading.Lock()
#: What stands in torch's place, the last entered at the end.
_standing: list[tuple[object, Attention]] = []
#: How many calls want torch to look as if nothing stood there.
_suspended = 0
#: What was there before the first; another library may have been faster.
_found: Attention = F.scaled_dot_product_attention
#: All functions that ever stood there, by identity: they equal torch's own.
_ours: dict[int, Attention] = {}


def enter(token: object, function: Attention) -> None:
    """Puts a function in the place of torch's."""
    global _found
    with _lock:
        if not _standing and id(F.scaled_dot_product_attention) not in _ours:
            _found = F.scaled_dot_product_attention
        if id(function) not in _ours:
            _ours[id(function)] = function
            # Scripts take it for the builtin that it stands for.
            _builtins._register_builtin(function, "aten::scaled_dot_product_attention")
        _standing.append((token, function))
        _settle()


def leave(token: object) -> None:
    """Takes away what was entered with a token, in whatever order."""
    with _lock:
        for place, (known, _) in enumerate(_standing):
            if known is token:
                del _standing[place]
                break
        _settle()


def stands() -> bool:
    """Whether anything is entered."""
    return len(_standing) > 0  # not `bool`: compilers of older versions do not know it of lists


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, **rest: Any
) -> Any:
    """torch computes."""
    # Only what was said: who overrides the function may know fewer arguments.
    said = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **rest}
    return as_called((query, key, value), {name: value for name, value in said.items() if not _is_default(name, value)})


def as_called(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """torch computes, and sees the arguments as they are. Who overrides torch's functions compares with the name in the module, or
    keeps what it found there: as long as such a one may look, the name is torch's own."""
    if torch.compiler.is_compiling():
        # A compiler does not see the name change: torch's own subclass that compares with it is asked directly.
        known: Any = sys.modules.get("torch.nn.attention.bias")
        mask: Any = given[3] if len(given) > 3 else named.get("attn_mask")
        if known is not None and type(mask) is known.CausalBias:
            return known.CausalBias._dispatch(*given, **named)
        return _found(*given, **named)
    if not _standing or not _may_be_overridden(*given, *named.values()):
        return _found(*given, **named)
    _suspend(1)
    try:
        return _found(*given, **named)
    finally:
        _suspend(-1)


def _is_default(name: str, value: Any) -> bool:
    if name == "dropout_p":
        return type(value) is float and value == 0.0
    return value is (None if name in ("attn_mask", "scale") else False)


def _may_be_overridden(*arguments: Any) -> bool:
    return torch._C._len_torch_function_stack() > 0 or any(type(x) not in _SILENT for x in arguments)


#: Types that have no say in what a function does.
_SILENT = (Tensor, float, int, bool, type(None))


def _suspend(by: int) -> None:
    global _suspended
    with _lock:
        _suspended += by
        _settle()


def _settle() -> None:
    """Sets the name to what it should be, unless somebody else has put a function there since."""
    now = F.scaled_dot_product_attention
    if id(now) in _ours or now is _found:
        F.scaled_dot_product_attention = _standing[-1][1] if _standing and not _suspended else _found
