"""What a call has beside Q, K and V: lengths, pages, modifiers, scales, by the names that the native side knows.

A :data:`Side` holds tensors or arrays and numbers; what is ``None`` is not there.

=============================  ===========================================================================================
``cu_seqlens_q``, ``…_k``      where each sequence begins among packed tokens, int32 ``[batch + 1]``
``max_seqlen_q``, ``…_k``      the longest sequence of packed ones, a number
``seqused_q``, ``…_k``         queries and filled keys of each sequence, in room for more, int32 ``[batch]``
``leftpad_k``                  filled keys before each sequence's first, int32 ``[batch]``
``cache_batch_idx``            the block of the cache, or the row of the page table, of each sequence, int32 ``[batch]``
``page_table``                 pages of each sequence, int32 ``[batch, pages]``
``bias``                       added to scores: float ``[batch or 1, heads or 1, queries or 1, keys]``
``mask``                       bool or uint8 of the same form; False hides a key
``blocks``                     uint8 ``[batch or 1, heads or 1, blocks of queries, blocks of keys]``, contiguous; 0 hides a block
``block_q``, ``block_k``       queries and keys of a block, numbers
``alibi_slopes``, ``sinks``    float32, one a query head
``q_scales``, ``k_…``, ``v_…``  float32 scales of 8-bit tensors; how far one reaches is ``scales_per``: tensor, head or token
``softcap``, ``chunk``         numbers
``fast``                       True refuses what only the plain baseline takes
=============================  ===========================================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

Side = dict[str, Any]

#: Element types by name: what the native side calls them.
CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "uint8": 4, "int8": 5}
#: Those that scales belong to.
EIGHT_BIT = frozenset(("float8_e4m3fn", "uint8", "int8"))

_LISTS = {
    "cu_seqlens_q": "int32",
    "cu_seqlens_k": "int32",
    "seqused_q": "int32",
    "seqused_k": "int32",
    "leftpad_k": "int32",
    "cache_batch_idx": "int32",
    "cache_seqlens": "int32",
    "cu_seqlens_k_new": "int32",
    "rotary_seqlens": "int32",
    "alibi_slopes": "float32",
    "sinks": "float32",
    "q_scales": "float32",
    "k_scales": "float32",
    "v_scales": "float32",
}
#: What says where sequences are.
INTEGERS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx", "page_table")
_FLOATS = ("float32", "float16", "bfloat16")
_NUMBERS = ("max_seqlen_q", "max_seqlen_k", "scales_per", "softcap", "chunk", "block_q", "block_k", "fast")


class Described(NamedTuple):
    """A tensor or array as plain facts. ``held`` keeps its memory."""

    held: Any
    dtype: str
    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def described(side: Side, describe: Callable[[Any], Described], device: str) -> tuple[Side, list[Any]]:
    """``side`` as the native side takes it, and the objects that must live until it returns. Refuses what is of a wrong
    type, form or device."""
    native: Side = {}
    held: list[Any] = []
    for name, value in side.items():
        if value is None:
            continue
        if name in _NUMBERS:
            native[name] = value
            continue
        try:
            fact = describe(value)
        except AttributeError:
            raise TypeError(f"{name} is a {type(value).__name__}; give a tensor or an array") from None
        if fact.device != device:
            raise ValueError(f"{name} is on {fact.device}, but q is on {device}; move it there")
        held.append(fact.held)
        if name in _LISTS:
            _check(name, fact, (_LISTS[name],), 1)
            native[name] = (fact.address, fact.shape[0])
        elif name == "page_table":
            _check(name, fact, ("int32",), 2)
            native[name] = (fact.address, fact.shape, fact.strides[0])
        elif name == "mask":
            _check(name, fact, ("bool", "uint8"), 4)
            native[name] = (fact.address, fact.shape, fact.strides)
        elif name == "blocks":
            _check(name, fact, ("uint8",), 4)
            rows, columns = fact.shape[2:]
            if fact.strides != (fact.shape[1] * rows * columns, rows * columns, columns, 1):
                raise ValueError(f"{name} has strides {list(fact.strides)}, but must be contiguous; copy it first")
            native[name] = (fact.address, fact.shape, fact.strides)
        elif name == "bias":
            _check(name, fact, _FLOATS, 4)
            native[name] = (CODES[fact.dtype], (fact.address, fact.shape, fact.strides))
        elif name in ("rotary_cos", "rotary_sin"):
            _check(name, fact, _FLOATS, 2)
            native[name] = (CODES[fact.dtype], (fact.address, (1, 1, *fact.shape), (0, 0, *fact.strides)))
        else:
            raise TypeError(f"there is no side input named {name!r}")
    return native, held


def _check(name: str, fact: Described, dtypes: tuple[str, ...], dimensions: int) -> None:
    if fact.dtype not in dtypes:
        raise TypeError(f"{name} holds {fact.dtype}, but must hold {' or '.join(dtypes)}; convert it")
    if len(fact.shape) != dimensions:
        raise ValueError(f"{name} has shape {list(fact.shape)}, but must have {dimensions} dimension{'s'[: dimensions > 1]}")
    if fact.strides[-1] != 1 and fact.shape[-1] > 1:
        raise ValueError(f"{name} has strides {list(fact.strides)}, but its last dimension must be contiguous; copy it first")


def with_rotary(native: Side, interleaved: bool) -> Side:
    """The same with cosines and sines as one entry."""
    cos, sin = native.pop("rotary_cos", None), native.pop("rotary_sin", None)
    if cos is not None and sin is not None:
        native["rotary"] = (cos, sin, interleaved)
    return native


def has_no_sequence(native: Side | None) -> bool:
    """Whether queries are packed and belong to nobody."""
    return native is not None and native.get("cu_seqlens_q", (0, 2))[1] == 1


def sees_nothing(native: Side | None, results: int, keys: int) -> bool:
    """Whether shapes alone say that no query sees a key, or that nothing is asked for."""
    if results == 0 or native is None:
        return results == 0 or keys == 0
    if "page_table" in native and native["page_table"][1][1] == 0:
        return True
    return has_no_sequence(native) or (
        keys == 0 and "cu_seqlens_k" not in native and not ("sinks" in native and "cu_seqlens_q" in native)
    )


def check_unused(side: Side | None) -> None:
    """Refuses lengths of a cache without room."""
    used = None if side is None else side.get("seqused_k")
    if used is not None and (used != 0).any():
        at = int((used != 0).nonzero()[0][0])
        raise ValueError(f"sequence {at} uses {int(used[at])} keys, but the cache has room for none")


def whole(name: str, value: Any) -> int:
    """A number that counts something."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; give a whole number") from None
