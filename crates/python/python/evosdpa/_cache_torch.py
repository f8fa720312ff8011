"""Caches of torch tensors: appending, rotary embedding, and the operators that compilers see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native, _side, _torch, _window, _words
from ._operator import ALL_CODES, CODES, check, described, is_checked, place, refusing_gradients


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: _window.Window, with_lse: bool, high: bool, side: _side.Side
) -> tuple[Tensor, Tensor | None]:
    """Attention of ``[batch, heads, sequence, head dimension]`` views of tensors whose heads come last but one."""
    check_plain(q=q, k=k, v=v)
    check(q, k, v, True)
    side = {name: value for name, value in side.items() if value is not None}
    if _torch.is_differentiated(*(value for value in side.values() if isinstance(value, Tensor))):
        raise NotImplementedError(_words.without_fallback(_words.autograd()))
    return _torch.attend(q, k, v, _torch.number(scale), window, True, with_lse, high, side)


def check_plain(**named: Tensor) -> None:
    """Refuses tensors that are not numbers in memory of a type that kernels read, or that somebody differentiates."""
    for name, x in named.items():
        check_memory(name, x)
        if _torch.is_differentiated(x):
            raise NotImplementedError(_words.without_fallback(_words.autograd()))
        if x.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(_words.without_fallback(_words.device(x.device)))
        if x.dtype not in ALL_CODES:
            raise NotImplementedError(f"{name} holds {x.dtype}; no kernel reads it: use {_words.element_types(x.dtype)}")


def check_memory(name: str, x: Tensor) -> None:
    """Refuses tensors of which elements may be left out."""
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} is {'nested' if x.is_nested else x.layout}; give a plain tensor")


def check_step(
    append: Any, place: _side.Side, turn: Any, q: Tensor, scale: float | None, window: _window.Window, side: _side.Side
) -> None:
    """Refuses a call of which a part would be refused when new tokens are written already. What a GPU holds is not looked at, unless that
    is asked for; compilers and modes see each operator check its own."""
    side = {name: value for name, value in side.items() if value is not None}
    tensors = [x for x in (q, *append, *(turn or ()), *side.values(), *place.values()) if isinstance(x, Tensor)]
    if _torch.is_differentiated(*tensors):
        raise NotImplementedError(_words.without_fallback(_words.autograd()))
    number = _torch.number(scale)
    if _torch.compiling() or not _torch.is_memory(*tensors):
        return
    k_cache, v_cache, k, v, interleaved = append
    _check_cache(k_cache, v_cache, k, v)
    check(q.transpose(1, 2) if q.dim() == 4 else q[None], k_cache, v_cache, True)
    if turn is not None and q.dtype not in CODES:
        raise NotImplementedError(f"q holds {q.dtype}: rotary embedding turns float32, float16 and bfloat16")
    reads = not q.is_cuda or is_checked(q)
    if reads and 0 not in k.shape:
        copies, copied = _copied(place)
        k_old, v_old, k_new, v_new = (_operand(x if x.dim() == 4 else x.unsqueeze(0)) for x in (k_cache, v_cache, k, v))
        _native.check_append(ALL_CODES[k_cache.dtype], k_old, v_old, k_new, v_new, _side.with_rotary(copies, interleaved))
        del copied  # had to live until here
    if 0 in q.shape:
        return
    if reads and turn is not None:
        _check_turn(*turn)
    here = {name: value.cpu() if isinstance(value, Tensor) and reads else value for name, value in side.items()}
    native, held = _side.described(here, described, "cpu" if reads else str(q.device))
    if k_cache.dtype != q.dtype:
        native["kv_dtype"] = ALL_CODES[k_cache.dtype]
    if q.dtype not in CODES:
        native["o_dtype"] = CODES[torch.bfloat16]
    asked, keys, values = (_operand(x if x.dim() == 4 else x.unsqueeze(0)) for x in (q, k_cache, v_cache))
    _native.check_call(ALL_CODES[q.dtype], asked, keys, values, number, window, native, reads and not q.is_cuda)
    del held  # had to live until here


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rotary_interleaved: bool, **named: Tensor | None) -> None:
    """Puts new keys and values, ``[…, tokens, heads, dim]``, into a cache of the same layout."""
    torch.ops.evosdpa.append(k_cache, v_cache, k, v, rotary_interleaved, **named)


def rotate(
    x: Tensor, rotary_cos: Tensor, rotary_sin: Tensor, first: Tensor, cu_seqlens: Tensor | None, advance: bool, interleaved: bool
) -> Tensor:
    """Turns ``[batch, tokens, heads, dim]`` or packed ``[tokens, heads, dim]`` by the angles of each token's position."""
    turned: Tensor = torch.ops.evosdpa.rotate(x, rotary_cos, rotary_sin, first, cu_seqlens, advance, interleaved)
    return turned


def full_int32(count: int, value: int, like: Tensor) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=like.device)


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def facts(tensor: Tensor) -> tuple[str, str]:
    """Type and device by name."""
    return str(tensor.dtype).removeprefix("torch."), str(tensor.device)


def ones(count: int, like: Tensor) -> Tensor:
    return torch.ones(count, dtype=torch.float32, device=like.device)


def number(x: Any) -> float | None:
    return _torch.number(x)


def float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return _torch.rows(*tensors)


def repeated(x: Tensor, times: int) -> Tensor:
    """Each element of a matrix so many times in its row, contiguous and flat."""
    # Scales as they are cost no kernel.
    return (x if times == 1 else x.repeat_interleave(times, dim=1)).reshape(-1).contiguous()


def _append_op(k_cache, v_cache, k, v, rotary_interleaved, cache_seqlens, *rest):  # type: ignore[no-untyped-def]
    names = ("cu_seqlens_k_new", "page_table", "cache_batch_idx", "rotary_cos", "rotary_sin", "rotary_seqlens")
    side = {"cache_seqlens": cache_seqlens, **dict(zip(names, rest))}
    _check_cache(k_cache, v_cache, k, v)
    native, held = _side.described(side, described, str(k_cache.device))
    operands = [_operand(x if x.dim() == 4 else x.unsqueeze(0)) for x in (k_cache, v_cache, k, v)]
    code = ALL_CODES[k_cache.dtype]
    k_old, v_old, k_new, v_new = operands
    if is_checked(k_cache):
        copies, copied = _copied(side)
        _native.check_append(code, k_old, v_old, k_new, v_new, _side.with_rotary(copies, rotary_interleaved))
        del copied  # had to live until here
    ordinal, queue = place(k_cache)
    _native.append(code, k_old, v_old, k_new, v_new, ordinal, queue, _side.with_rotary(native, rotary_interleaved))
    del held  # had to live until here


def _copied(side: _side.Side) -> tuple[_side.Side, list[object]]:
    """Lists and page tables in this process's memory, for which it waits. Of angles only the form is asked."""
    return _side.described({name: value if value is None else value.cpu() for name, value in side.items()}, described, "cpu")


def _check_cache(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x.dim() not in ((4,) if "cache" in name else (3, 4)):
            raise ValueError(f"{name} has shape {list(x.shape)}; use four dimensions (three for packed new tokens)")
        if x.dtype != k_cache.dtype:
            raise TypeError(f"{name} holds {x.dtype}, but k_cache holds {k_cache.dtype}; convert it")
        if x.device != k_cache.device:
            raise ValueError(f"{name} is on {x.device}, but k_cache is on {k_cache.device}; move it there")
    if k_cache.dtype not in ALL_CODES:
        raise NotImplementedError(f"k_cache holds {k_cache.dtype}; use {_words.element_types(k_cache.dtype)}")


def _operand(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """``[batch, tokens, heads, dim]`` with heads and tokens in the native side's order."""
    x = x.transpose(1, 2)
    return x.data_ptr(), tuple(x.shape), x.stride()


def _rotate_op(x, rotary_cos, rotary_sin, first, cu_seqlens, advance, interleaved):  # type: ignore[no-untyped-def]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if cu_seqlens is not None and not x.is_cuda:
        # Tokens that belong to no sequence stay as they are; on a GPU the kernel sees to it.
        out.copy_(x)
    side = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": first, "cu_seqlens_q": cu_seqlens}
    native, held = _side.described(side, described, str(x.device))
    angles = _side.with_rotary(native, interleaved)["rotary"]
    turned, into = (_operand(tensor if tensor.dim() == 4 else tensor.unsqueeze(0)) for tensor in (x, out))
    lists = native["rotary_seqlens"], native.get("cu_seqlens_q")
    if is_checked(x):
        _check_turn(x, rotary_cos, rotary_sin, first, cu_seqlens, advance, interleaved)
    ordinal, queue = place(x)
    _native.rotate(ALL_CODES[x.dtype], turned, into, angles, *lists, advance, ordinal, queue)
    del held  # had to live until here
    return out


def _check_turn(
    x: Tensor, rotary_cos: Tensor, rotary_sin: Tensor, first: Tensor, cu_seqlens: Tensor | None, advance: bool, interleaved: bool
) -> None:
    """Positions that have no angles."""
    side = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": first, "cu_seqlens_q": cu_seqlens}
    copies, copied = _copied(side)
    angles = _side.with_rotary(copies, interleaved)["rotary"]
    turned = _operand(x if x.dim() == 4 else x.unsqueeze(0))
    _native.check_rotate(ALL_CODES[x.dtype], turned, angles, copies["rotary_seqlens"], copies.get("cu_seqlens_q"), advance)
    del copied  # had to live until here


# The library object must live as long as the operators.
_library: Any = torch.library  # of which not all is typed
_LIBRARY = _library.Library("evosdpa", "FRAGMENT")
_LIBRARY.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, bool rotary_interleaved, Tensor cache_seqlens, "
    "Tensor? cu_seqlens_k_new=None, Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? rotary_seqlens=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "rotate(Tensor x, Tensor rotary_cos, Tensor rotary_sin, Tensor first, Tensor? cu_seqlens, bool advance, "
    "bool interleaved) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("append", _append_op, _key)
    _LIBRARY.impl("rotate", _rotate_op, _key)
torch.library.register_fake("evosdpa::append", lambda *given: None, lib=_LIBRARY)
torch.library.register_fake(
    "evosdpa::rotate", lambda x, *given: torch.empty(x.shape, dtype=x.dtype, device=x.device), lib=_LIBRARY
)
_LIBRARY.impl("rotate", refusing_gradients("rotate"), "Autograd", with_keyset=True)
