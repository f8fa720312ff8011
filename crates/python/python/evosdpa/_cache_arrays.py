"""Caches of NumPy arrays: appending and rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy

from . import _arrays, _native, _side, _window, _words


def attend(
    q: Any, k: Any, v: Any, scale: float | None, window: _window.Window, with_lse: bool, high: bool, side: _side.Side
) -> tuple[Any, Any]:
    """Attention of ``[batch, heads, sequence, head dimension]`` views of arrays."""
    check_plain(q=q, k=k, v=v)
    _arrays._check_dimensions(q, k, v)
    return _arrays.forward(q, k, v, scale, window, with_lse, high, side)


def check_plain(**named: Any) -> None:
    """Refuses arrays that mean more than their memory holds, or hold what no kernel reads."""
    for name, array in named.items():
        if type(array) not in (numpy.ndarray, numpy.memmap):
            raise TypeError(_words.subclass(name, type(array).__name__))
        if not array.dtype.isnative:
            raise TypeError(f"{name} holds {array.dtype.str}, another machine's byte order; convert it")
        if name != "q" and array.dtype.name in _side.EIGHT_BIT:
            continue
        refusal = _arrays._refusal(array, 0.0)
        if refusal is not None:
            raise NotImplementedError(_words.without_fallback(refusal))


def check_step(
    append: Any, place: _side.Side, turn: Any, q: Any, scale: float | None, window: _window.Window, side: _side.Side
) -> None:
    """Refuses a call of which a part would be refused when new tokens are written already."""
    k_cache, v_cache, k, v, interleaved = append
    _check_cache(k_cache, v_cache, k, v)
    are_codes = k_cache.dtype.name in _side.EIGHT_BIT
    if q.dtype != k_cache.dtype and not are_codes:
        raise TypeError(f"q, k and v hold {q.dtype}, {k_cache.dtype} and {v_cache.dtype}; convert them to one type")
    code, kv_code = (_side.CODES[x.dtype.name] for x in (q, k_cache))
    k_old, v_old = _operand(k_cache), _operand(v_cache)
    if 0 not in k.shape:
        native, held = _side.described(place, _arrays._fact, "cpu")
        _native.check_append(kv_code, k_old, v_old, _operand(k), _operand(v), _side.with_rotary(native, interleaved))
        del held  # had to live until here
    if 0 in q.shape:
        return
    if turn is not None:
        x, cos, sin, first, cu_seqlens, advance, interleaved = turn
        named = {"rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": first, "cu_seqlens_q": cu_seqlens}
        more, held_too = _side.described(named, _arrays._fact, "cpu")
        angles = _side.with_rotary(more, interleaved)["rotary"]
        _native.check_rotate(code, _operand(x), angles, more["rotary_seqlens"], more.get("cu_seqlens_q"), advance)
        del held_too  # had to live until here
    beside, held_also = _side.described(side, _arrays._fact, "cpu")
    if are_codes:
        beside["kv_dtype"] = kv_code
    asked = _operand(_arrays._readable(q if q.ndim == 4 else q[None]))
    _native.check_call(code, asked, k_old, v_old, scale, window, beside, True)
    del held_also  # had to live until here


def _operand(x: Any) -> Any:
    return _arrays._described((x if x.ndim == 4 else x[None]).swapaxes(1, 2))


def _check_cache(k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x.dtype != k_cache.dtype:
            raise TypeError(f"{name} holds {x.dtype}, but k_cache holds {k_cache.dtype}; convert it")
        if "cache" in name and not x.flags.writeable:
            raise ValueError(f"{name} is read-only, but new tokens are written to it")


def append(k_cache: Any, v_cache: Any, k: Any, v: Any, rotary_interleaved: bool, **named: Any) -> None:
    """Puts new keys and values, ``[…, tokens, heads, dim]``, into a cache of the same layout."""
    _check_cache(k_cache, v_cache, k, v)
    native, held = _side.described(named, _arrays._fact, "cpu")
    operands = [_operand(x) for x in (k_cache, v_cache, k, v)]
    k_old, v_old, k_new, v_new = operands
    named_too = _side.with_rotary(native, rotary_interleaved)
    _native.append(_side.CODES[k_cache.dtype.name], k_old, v_old, k_new, v_new, -1, 0, named_too)
    del held  # had to live until here


def rotate(x: Any, rotary_cos: Any, rotary_sin: Any, first: Any, cu_seqlens: Any, advance: bool, interleaved: bool) -> Any:
    """Turns ``[batch, tokens, heads, dim]`` or packed ``[tokens, heads, dim]`` by the angles of each token's position."""
    out = x.copy(order="C")
    side = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": first, "cu_seqlens_q": cu_seqlens}
    native, held = _side.described(side, _arrays._fact, "cpu")
    angles = _side.with_rotary(native, interleaved)["rotary"]
    turned, into = (_arrays._described((array if array.ndim == 4 else array[None]).swapaxes(1, 2)) for array in (x, out))
    lists = native["rotary_seqlens"], native.get("cu_seqlens_q")
    _native.rotate(_arrays._CODES[x.dtype.name], turned, into, angles, *lists, advance, -1, 0)
    del held  # had to live until here
    return out


def full_int32(count: int, value: int, like: Any) -> Any:
    return numpy.full(count, value, numpy.int32)


def check_memory(name: str, value: Any) -> None:
    """Every array of NumPy is memory."""


def is_tensor(value: Any) -> bool:
    return isinstance(value, numpy.ndarray)


def facts(array: Any) -> tuple[str, str]:
    """Type and device by name."""
    return _arrays._fact(array).dtype, "cpu"


def ones(count: int, like: Any) -> Any:
    return numpy.ones(count, numpy.float32)


def number(x: Any) -> float:
    return float(x)


def float32(x: Any) -> Any:
    return numpy.ascontiguousarray(x, "float32")


def rows(*arrays: Any) -> tuple[Any, ...]:
    """With a contiguous last dimension."""
    return tuple(map(_arrays._readable, arrays))


def repeated(x: Any, times: int) -> Any:
    """Each element of a matrix so many times in its row, contiguous and flat."""
    return x.repeat(times, axis=1).reshape(-1)
