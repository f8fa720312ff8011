"""What FlashAttention's functions are given beside Q, K and V: refused by name, or made what the native side takes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import _arrays, _binding, _side, _words


def held_then(lib: ModuleType, k_cache: Any, k: Any, v: Any, cache_seqlens: Any, cu_seqlens_k_new: Any) -> Any:
    """How many tokens each sequence holds when the new ones are written."""
    if v is None:
        raise ValueError("new keys come with new values: v is missing")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is missing: it says where new keys and values go")
    expect(lib, k_cache, 4 if cu_seqlens_k_new is None else 3, k=k, v=v)
    return cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1])


def for_each(q: Any, k_cache: Any, cu_seqlens_q: Any, length: int) -> Any:
    """One length for all sequences as a list, where nothing is to be said about it or the tensors."""
    lib = library(q) if cu_seqlens_q is None and 0 <= length < 2**31 and type(q) is type(k_cache) else None
    if lib is None or q.ndim != 4:
        return length
    return lib.full_int32(q.shape[0], length, k_cache)


def library(q: Any) -> ModuleType | None:
    """The module that knows tensors of this kind; ``None`` for those of other libraries."""
    torch_side = _binding.torch_side
    if torch_side is not None and isinstance(q, torch_side.Tensor):
        from . import _cache_torch

        return _cache_torch
    if not _arrays.are_arrays(q):
        return None
    from . import _cache_arrays

    return _cache_arrays


def refuse(qv: Any, dropout_p: float) -> None:
    if qv is not None:
        raise NotImplementedError("qv is given: evosdpa has no second query; concatenate it with q, and v with k")
    if dropout_p != 0.0:
        raise NotImplementedError(_words.without_fallback(_words.dropout(dropout_p)))


def one_of(**named: Any) -> Any:
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given; they are the same")
    return next(iter(given.values()), None)


def expect(lib: ModuleType, like: Any, dimensions: int, **named: Any) -> None:
    for name, value in named.items():
        if value is None:
            raise TypeError(f"{name} is missing; give a {type(like).__name__}, as q is")
    _check_kind(lib, like, **named)
    for name, value in named.items():
        lib.check_plain(**{name: value})
        if value.ndim != dimensions:
            layout = "tokens, heads, head dimension"
            layout = layout if dimensions == 3 else f"batch or pages, {layout}"
            raise ValueError(f"{name} has shape {list(value.shape)}, but must have {dimensions} dimensions ({layout})")


def _check_kind(lib: ModuleType, like: Any, **named: Any) -> None:
    """What comes beside the queries must be of their kind."""
    for name, value in named.items():
        if value is not None and not lib.is_tensor(value):
            raise TypeError(f"{name} is a {type(value).__name__}; give a {type(like).__name__}, as q is")
        if value is not None:
            lib.check_memory(name, value)


def integers(lib: ModuleType, q: Any, count: int, **named: Any) -> None:
    """What a list of lengths or indices must be."""
    for name, value in named.items():
        if value is None:
            continue
        _int32(lib, q, name, value)
        if tuple(value.shape) != (count,):
            raise ValueError(f"{name} has shape {list(value.shape)}, but must be [{count}] for these sequences")


def check_table(lib: ModuleType, q: Any, table: Any) -> None:
    _int32(lib, q, "page_table", table)
    if table.ndim != 2:
        raise ValueError(f"page_table has shape {list(table.shape)}, but must be [batch, pages of a sequence]")


def _int32(lib: ModuleType, q: Any, name: str, value: Any) -> None:
    _check_kind(lib, q, **{name: value})
    dtype, device = lib.facts(value)
    if dtype != "int32":
        raise TypeError(f"{name} holds {dtype}, but must hold int32; convert it")
    here = lib.facts(q)[1]
    if device != here:
        raise ValueError(f"{name} is on {device}, but q is on {here}; move it there")


def count(lib: ModuleType, q: Any, name: str, value: Any) -> int:
    """The length of a list that says how many sequences there are."""
    if value is None:
        raise ValueError(f"{name} is missing: it says where each sequence begins")
    _check_kind(lib, q, **{name: value})
    if value.ndim != 1 or value.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must have one dimension, one longer than there are sequences")
    return int(value.shape[0])


def longest(name: str, cu_seqlens: Any, given: Any) -> int:
    """The length of the longest sequence: as given, or counted."""
    if given is None:
        return max(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()), 1) if cu_seqlens.shape[0] > 1 else 1
    return max(_side.whole(name, given), 1)


def check_fit(q: Any, k_cache: Any, k: Any, table: Any) -> None:
    """What would be refused only after new tokens are written."""
    if table is not None and table.shape[1] == 0 and 0 not in k.shape:
        raise ValueError("page_table has no columns: there is no page for new tokens")
    (heads, dim), (heads_kv, dim_kv) = q.shape[-2:], k_cache.shape[-2:]
    if heads_kv == 0 or heads % heads_kv or dim != dim_kv:
        raise ValueError(f"q has {heads} heads of {dim} elements, k_cache {heads_kv} of {dim_kv}: heads must be a multiple, elements as many")


def check_rotary(lib: ModuleType, q: Any, k: Any, rotary_cos: Any, rotary_sin: Any) -> None:
    _check_kind(lib, q, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin come together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin are applied to new keys and the queries: k is missing")


def scores(lib: ModuleType, q: Any, batch: int, softcap: float, chunk: int, alibi_slopes: Any, s_aux: Any) -> _side.Side:
    side: _side.Side = {}
    _check_kind(lib, q, alibi_slopes=alibi_slopes, s_aux=s_aux)
    if softcap:
        side["softcap"] = lib.number(softcap)
    if chunk:
        side["chunk"] = _side.whole("attention_chunk", chunk)
    if alibi_slopes is not None:
        if alibi_slopes.ndim == 2 and (alibi_slopes.shape[0] == 1 or (alibi_slopes.shape[0] == batch and _is_expanded(alibi_slopes))):
            alibi_slopes = alibi_slopes[0]
        if alibi_slopes.ndim != 1:
            shape, heads = list(alibi_slopes.shape), q.shape[-2]
            raise NotImplementedError(
                f"alibi_slopes has shape {shape}: evosdpa has slopes a head, not a sequence; "
                f"give [{heads}] (or expand it), and call once for each sequence whose slopes differ"
            )
        _check_heads(q, alibi_slopes=alibi_slopes)
        side["alibi_slopes"] = alibi_slopes
    if s_aux is not None:
        _check_heads(q, s_aux=s_aux)
        side["sinks"] = lib.float32(s_aux)
    return side


def _is_expanded(x: Any) -> bool:
    """Whether all rows are the same memory."""
    strides = x.stride() if callable(getattr(x, "stride", None)) else x.strides
    return bool(strides[0] == 0)


def _check_heads(q: Any, **named: Any) -> None:
    for name, value in named.items():
        if tuple(value.shape) != (q.shape[-2],):
            raise ValueError(f"{name} has shape {list(value.shape)}, but must be [{q.shape[-2]}], one for each query head")


def scales(lib: ModuleType, q: Any, k: Any, v: Any, batch: int, q_descale: Any, k_descale: Any, v_descale: Any) -> _side.Side:
    """Scales of 8-bit tensors, ``[batch, key/value heads]``, 1 where none are given; the queries' by their own heads."""
    side: _side.Side = {}
    _check_kind(lib, q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    heads, heads_kv = q.shape[-2], k.shape[-2]
    for name, tensor, given in (("q", q, q_descale), ("k", k, k_descale), ("v", v, v_descale)):
        if lib.facts(tensor)[0] not in _side.EIGHT_BIT:
            continue
        times = heads // heads_kv if name == "q" and heads_kv else 1
        if given is None:
            side[f"{name}_scales"] = lib.ones(batch * heads_kv * times, tensor)
            continue
        if tuple(given.shape) != (batch, heads_kv):
            raise ValueError(f"{name}_descale has shape {list(given.shape)}, but must be [{batch}, {heads_kv}] (batch, key/value heads)")
        side[f"{name}_scales"] = lib.repeated(given, times)
    return side
