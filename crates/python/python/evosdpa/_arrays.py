"""NumPy arrays."""

from __future__ import annotations

import math
import sys
from typing import Any

from . import _binding, _native, _side, _window, _words

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
_codes: dict[Any, int | None] = {}


def sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool, high: bool, fallback: bool
) -> Any:
    if dropout_p == 0.0 and not (is_causal and attn_mask is not None):
        scores = None if attn_mask is None else (attn_mask, 0.0, 0, None, None)
        done = _native.straight(q, k, v, scale, is_causal, enable_gqa, False, False, high, False, scores, True)
        if done is not None:
            return done
    q, k, v = _native_order(q=q, k=k, v=v)
    if attn_mask is not None:
        if is_causal:
            raise ValueError(_words.mask_twice())
        (attn_mask,) = _native_order(attn_mask=attn_mask)
    refusal = _refusal(q, dropout_p)
    if refusal is not None:
        if fallback and (torch_side := _binding.torch_side) is not None:
            mask = None if attn_mask is None else torch_side.torch.as_tensor(attn_mask)
            tensors = [torch_side.torch.as_tensor(array) for array in (q, k, v)]
            return torch_side.sdpa(*tensors, mask, dropout_p, is_causal, scale, enable_gqa, high, True).numpy()
        raise NotImplementedError(_words.torch_is_missing(refusal) if fallback else refusal)
    three = q.ndim == 3
    if three:
        q, k, v = q[None], k[None], v[None]
    _check_dimensions(q, k, v)
    if q.shape[1] != k.shape[1] and k.shape[1] != 1 and not enable_gqa:
        raise ValueError(_words.heads(q.shape[1], k.shape[1]))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        q, k, v = _broadcast_batch(q, k, v)
    side = None if attn_mask is None else _beside(attn_mask, q, k, three)
    out, _ = forward(q, k, v, scale, _window.CAUSAL if is_causal else _window.FULL, False, high, side)
    return out[0] if three else out


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    dropout_p: float,
    with_lse: bool,
    high: bool,
    fallback: bool,
) -> tuple[Any, Any]:
    rest = (softmax_scale, causal, window_size, dropout_p, with_lse, high, fallback)
    q, k, v = _native_order(q=q, k=k, v=v)
    refusal = _refusal(q, dropout_p)
    if refusal is not None:
        if fallback and (side := _binding.torch_side) is not None:
            tensors = [side.torch.as_tensor(array) for array in (q, k, v)]
            out, lse = side.flash_attention(*tensors, *rest)
            return out.numpy(), None if lse is None else lse.numpy()
        raise NotImplementedError(_words.torch_is_missing(refusal) if fallback else refusal)
    _check_dimensions(q, k, v, layout=_words.BY_TOKEN)
    q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
    out, lse = forward(q, k, v, softmax_scale, _window.flash_window(causal, window_size), with_lse, high)
    return out.swapaxes(1, 2), lse


def forward(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    window: _window.Window,
    with_lse: bool,
    high: bool,
    side: _side.Side | None = None,
) -> tuple[Any, Any]:
    """Attention of 4-D arrays ``[batch, heads, sequence, head dimension]``, packed or paged as ``side`` says. The output lies
    in memory in Q's order."""
    import numpy

    batch, heads, queries, _ = q.shape
    # Keys and values of codes have scales beside them.
    kv_dtype = _side.CODES[k.dtype.name] if side and "k_scales" in side else None
    if k.dtype != v.dtype or (q.dtype != k.dtype and kv_dtype is None):
        raise TypeError(f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}; convert them to one type")
    code = _code(q.dtype)
    if code is None:
        raise NotImplementedError(_words.dtype(q.dtype))
    q, k, v = map(_readable, (q, k, v))
    by_sequence = q.strides[1] < q.strides[2]
    if by_sequence:
        out = numpy.empty((batch, queries, heads, v.shape[3]), q.dtype).swapaxes(1, 2)
    else:
        out = numpy.empty((batch, heads, queries, v.shape[3]), q.dtype)
    lse = numpy.empty((batch, heads, queries), numpy.float32) if with_lse else None
    native = held = None
    if side:
        native, held = _side.described(side, _fact, "cpu")
        if kv_dtype is not None:
            native["kv_dtype"] = kv_dtype
    if _side.sees_nothing(native, out.size if lse is None else lse.size, k.shape[2]):
        if out.size:
            _side.check_unused(side)
        out.fill(0)
        if lse is not None:
            has_sinks = side and side.get("sinks") is not None and not _side.has_no_sequence(native)
            lse[...] = side["sinks"][:, None] if side and has_sinks else -numpy.inf
        return out, lse
    operands = (_described(q), _described(k), _described(v), _described(out))
    lse_address = 0 if lse is None else _native.described(lse)[0]
    _native.forward(code, *operands, lse_address, scale, window, high, -1, 0, native)
    del held  # had to live until here
    return out, lse


def _fact(array: Any) -> _side.Described:
    address, shape, strides = _described(array)
    name = array.dtype.name if array.dtype.isnative else array.dtype.str
    return _side.Described(array, name, "cpu", address, shape, strides)


def _described(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    address, shape, strides = _native.described(array)
    if array.size == 0:  # NumPy gives such arrays strides of 0
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return address, shape, strides


def _readable(array: Any) -> Any:
    """The array itself if its strides are whole elements that run forwards along a contiguous head dimension, else a copy."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    import numpy

    size = array.itemsize
    steps = [stride for stride, count in zip(array.strides, array.shape) if count > 1]
    is_readable = flags.aligned and all(step >= 0 and step % size == 0 for step in steps)
    is_readable = is_readable and (array.shape[-1] <= 1 or array.strides[-1] == size)
    return array if is_readable else numpy.array(array, order="C")


def _beside(mask: Any, q: Any, k: Any, three: bool) -> _side.Side:
    """A dense mask as the native side takes it: four dimensions, of which the last is contiguous."""
    import numpy

    if mask.dtype not in (numpy.bool_, numpy.float32, q.dtype):
        raise TypeError(_words.mask_dtype(mask.dtype, q.dtype))
    scores = (*q.shape[:3], k.shape[2])
    wanted = scores[1:] if three else scores
    spreads = mask.ndim <= len(wanted) and all(size in (1, whole) for size, whole in zip(mask.shape[::-1], wanted[::-1]))
    if not spreads:
        raise ValueError(_words.mask_shape(mask.shape, wanted))
    mask = mask[(None,) * (4 - mask.ndim)]
    for axis in range(3):
        if mask.shape[axis] > 1 and mask.strides[axis] == 0:
            mask = mask.take([0], axis)  # what repeats itself is said once
    if mask.shape[3] != scores[3]:
        mask = numpy.broadcast_to(mask, (*mask.shape[:3], scores[3]))
    return {"mask" if mask.dtype == numpy.bool_ else "bias": _readable(mask)}


def _native_order(**arrays: Any) -> list[Any]:
    """Arrays in the byte order of this machine: the other one is copied. Subclasses mean more than their memory holds."""
    import numpy

    for name, array in arrays.items():
        if type(array) not in (numpy.ndarray, numpy.memmap):
            raise TypeError(_words.subclass(name, type(array).__name__))
    return [array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")) for array in arrays.values()]


def are_arrays(*tensors: Any) -> bool:
    # Who has no NumPy has no arrays either.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    for tensor in tensors:  # no generator: it takes longer than the looks
        if not isinstance(tensor, numpy.ndarray):
            return False
    return True


def _refusal(q: Any, dropout_p: float) -> str | None:
    if dropout_p != 0.0:
        return _words.dropout(dropout_p)
    if _code(q.dtype) is None:
        hint = "" if "ml_dtypes" in sys.modules else " (NumPy has bfloat16 with the package ml_dtypes)"
        return _words.dtype(q.dtype) + hint
    return None


def _code(dtype: Any) -> int | None:
    """The native side's number for a type. Types are asked for their names once: NumPy makes a name anew each time."""
    if dtype not in _codes:
        _codes[dtype] = _CODES.get(dtype.name)
    return _codes[dtype]


def _check_dimensions(*arrays: Any, layout: str = _words.BY_HEAD) -> None:
    for array in arrays:
        if array.ndim != 4:
            raise ValueError(_words.dimensions(array.ndim, layout))


def _broadcast_batch(*arrays: Any) -> list[Any]:
    import numpy

    batch = max(array.shape[0] for array in arrays)
    return [
        numpy.broadcast_to(array, (batch, *array.shape[1:])) if array.shape[0] == 1 and batch > 1 else array for array in arrays
    ]
