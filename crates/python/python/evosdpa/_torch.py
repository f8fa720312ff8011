"""PyTorch: the fast path, the long way, and what is left to torch itself."""

from __future__ import annotations

import pathlib
import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from . import _blocks, _mask, _native, _original, _side, _window, _words
from ._operator import CODES, check, compute, shard_on_demand
from ._sizes import are_same, holds

_FLOAT32_MAX = torch.finfo(torch.float32).max
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Asked at every call.
_watched = torch._C._len_torch_dispatch_stack
_overridden = torch._C._len_torch_function_stack
_transformed = getattr(torch._C, "_functorch").peek_interpreter_stack
_Interpreter: Any = getattr(torch._C, "_functorch").CInterpreter
_traced = torch._C._get_tracing_state
_autocasting = torch._C._is_any_autocast_enabled
_profiling = getattr(torch.autograd, "_profiler_enabled")
_unpacked: Any = _forward_ad.unpack_dual
compiling = torch.compiler.is_compiling
# Whether a compiler reads the program: what traces it by running it gives tensors that are not plain, or watches. Quicker to ask.
is_read = torch.compiler.is_dynamo_compiling


def _guard(*tensors: Tensor) -> Any:
    """A function that says of other tensors of these types and dimensions, whatever their sizes, whether torch's dispatcher would do with
    them what it would do with these now; ``None`` where this torch has none, and for those that somebody may differentiate: whether anybody
    does now is not among what is asked. Made for torch's own compiled programs."""
    if any(tensor.requires_grad for tensor in tensors):
        return None
    any_size = [[None] * tensor.dim() for tensor in tensors]
    try:
        guards = getattr(torch._C, "_dynamo").guards.TensorGuards(*tensors, dynamic_dims_sizes=any_size, dynamic_dims_strides=any_size)
        return guards.check if guards.check(*tensors) else None
    except Exception:
        return None


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor is memory and nothing else: not negated, conjugated, named, wrapped or made of zeros."""
    return not torch._C._dispatch_keys(x).raw_repr() & ~_DENSE


def _keys(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_DENSE = _keys("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView")


def _use_torch() -> bool:
    """Newer versions of torch (2.10 on) describe a tensor by one C call; with older ones every call goes the long way."""
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return False
    # What compiled programs of torch allocate with: memory of the same allocator, without the way through the dispatcher.
    compiled = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    makers = tuple(getattr(compiled, f"_empty_strided_{device}", None) for device in ("cpu", "cuda"))
    parts = {
        "class": Tensor,
        "overriders": (_overridden, _profiling),
        "watchers": (_watched, _transformed, _traced, _autocasting),
        "guard": _guard,
        "is_dense": _is_dense,
        "is_grad_enabled": torch.is_grad_enabled,
        "forward_ad": vars(_forward_ad),
        "no_level": -1,
        "threads": torch.get_num_threads,
        "empty_like": torch.empty_like,
        "makers": None if None in makers else makers,
        "dtypes": (torch.float32, torch.float16, torch.bfloat16, torch.int32),
    }
    return _native.use_torch(Tensor.__dlpack_c_exchange_api__, parts)


_EXCHANGED = _use_torch()
# The common case at once: plain tensors of one type and device that no one differentiates, transforms or watches. Gives the output, or a
# pair with the log-sum-exp where that is asked for. Anything else gives ``None``, and the long way finds out what it is. Not while compiling: a compiler cannot see into it.
# What changes scores comes last: a mask or bias, softcap, chunk, ALiBi's slopes and sinks.
straight = _native.straight


def are_tensors(q: object, k: object, v: object) -> bool:
    return isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    high: bool,
    fallback: bool,
) -> Tensor:
    given = (q, k, v, attn_mask, dropout_p, is_causal)
    if fallback and attn_mask is None and q.dim() > 4 and (four := _folded(q, k, v)) is not None:
        if _can_take(*four, scale, enable_gqa, refusal_of(*four, dropout_p)):
            out = sdpa(*four, None, dropout_p, is_causal, scale, enable_gqa, high, fallback)
            return out.contiguous().unflatten(0, q.shape[:-3])  # as torch leaves it
    blocks = None
    if attn_mask is not None and _blocks.is_block_mask(attn_mask):
        if fallback:  # torch says that it does not take it
            return cast(Tensor, _original.attention(*given, scale=scale, enable_gqa=enable_gqa))
        blocks, attn_mask = attn_mask, None
    if attn_mask is not None and is_causal and not fallback:
        raise ValueError(_words.mask_twice())
    window, mask = _meaning(attn_mask, is_causal, q, k)
    q, k, v = autocast(q, k, v)
    refusal = refusal_of(q, k, v, dropout_p)
    objection = None
    if mask is not None and fallback and q.is_cuda:
        # When last measured on a GPU such calls cost the host more than torch's, and short ones were no faster (docs/log/models.md).
        return cast(Tensor, _original.attention(*given, scale=scale, enable_gqa=enable_gqa))
    if refusal is None and isinstance(mask, Tensor) and is_differentiated(mask):
        refusal = _words.autograd()
    in_rows = refusal is not None or all(holds(x.stride(-1) == 1) for x in (q, k, v))
    if not in_rows:
        # A copy is cheaper than what torch does with them: none of its fast kernels takes such tensors.
        q, k, v = rows(q, k, v)
    taken = not fallback or _can_take(q, k, v, scale, enable_gqa, refusal)
    if mask is not None and refusal is None and taken:
        mask = autocast(mask)[0] if isinstance(mask, Tensor) else mask
        objection = _mask.objection(mask, q, k)
    if fallback and not (
        taken
        # A mask of one dimension is an error of torch's.
        and (mask is None or (objection is None and not is_causal and mask.dim() > 1 and _is_plain(mask)))
    ):
        return cast(Tensor, _original.attention(*given, scale=scale, enable_gqa=enable_gqa))
    if refusal is not None:
        raise NotImplementedError(refusal)
    if objection is not None:
        raise objection
    three = q.dim() == 3
    if three:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    check(q, k, v)
    if q.size(1) != k.size(1) and k.size(1) != 1 and not enable_gqa:
        raise ValueError(_words.heads(q.size(1), k.size(1)))
    if not q.size(0) == k.size(0) == v.size(0):
        batch = max(q.size(0), k.size(0), v.size(0))
        q, k, v = (x.expand(batch, -1, -1, -1) if x.size(0) == 1 else x for x in (q, k, v))
    # The output lies in memory as the queries do, so that a model's next view of it is free; contiguous where torch's is.
    is_spread = not enable_gqa and not holds(q.size(1) == k.size(1))
    like_q = (in_rows and (not is_spread or _KEEPS_SPREAD_IN_ORDER)) or not fallback
    by_sequence = like_q and holds(q.stride(1) < q.stride(2)) and (q.is_cuda or holds(v.size(-1) == q.size(-1)))
    side = None if mask is None else _mask.beside(mask, k.size(2))
    if blocks is not None:
        side = _blocks.beside(blocks, q, k)
    try:
        out, _ = attend(q, k, v, number(scale), window, by_sequence, False, high, side)
    except NotImplementedError:
        # No kernel of this GPU takes it.
        if not fallback or side is None:
            raise
        return cast(Tensor, _original.attention(*given, scale=scale, enable_gqa=enable_gqa))
    if like_q and q.device.type == "cpu" and (compiling() or (_traced() is None and _transformed() is None)):
        # With a mask of three dimensions torch's own is contiguous.
        out = out.contiguous() if mask is not None and mask.dim() == 3 and not three else _laid_out(out, q)
        if three and not _KEEPS_THREE_IN_ORDER:
            out = out.contiguous()
    return out.squeeze(0) if three else out


def _folded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Tensors of more than four dimensions, as windows of images have them (NesT, Hiera), with one batch dimension; ``None`` where
    theirs differ."""
    if compiling() or any(x.is_nested or x.layout != torch.strided for x in (q, k, v)):
        return None
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return None
    return q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)


def _laid_out(out: Tensor, q: Tensor) -> Tensor:
    """In memory as torch's own attention leaves it on a CPU: the dimensions in the order of the queries', and contiguous where values
    are of another head dimension. That differs for queries of uncommon strides alone."""
    if type(q) not in _PLAIN or type(out) is not Tensor:
        return out
    wanted = torch.empty_like(q).stride() if are_same(out.shape, q.shape) else torch.empty(out.shape, dtype=out.dtype).stride()
    if are_same(out.stride(), wanted):
        return out
    return torch.empty_strided(out.shape, wanted, dtype=out.dtype).copy_(out)


def _keeps_three_in_order() -> bool:
    """Whether this version of torch gives outputs of three dimensions the order of the queries; older ones make them contiguous."""
    x = torch.zeros(2, 2, 1, dtype=torch.float32, device="cpu").transpose(0, 1)
    return bool(getattr(torch._C, "_nn").scaled_dot_product_attention(x, x, x).stride() == x.stride())


def _keeps_spread_in_order() -> bool:
    """The same for one head of keys that many heads of queries share."""
    x = torch.zeros(1, 2, 2, 1, dtype=torch.float32, device="cpu").transpose(1, 2)
    return bool(getattr(torch._C, "_nn").scaled_dot_product_attention(x, x[:, :1], x[:, :1]).stride() == x.stride())


# Asked once, where no compiler reads: it would take the answers for a part of the program.
_KEEPS_THREE_IN_ORDER, _KEEPS_SPREAD_IN_ORDER = _keeps_three_in_order(), _keeps_spread_in_order()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    dropout_p: float,
    with_lse: bool,
    high: bool,
    fallback: bool,
) -> tuple[Tensor, Tensor | None]:
    window = _window.flash_window(causal, window_size)
    for x in (q, k, v):
        if x.dim() != 4:
            raise ValueError(_words.dimensions(x.dim(), _words.BY_TOKEN))
    refusal = refusal_of(q, k, v, dropout_p)
    if fallback and (refusal is not None or not _have_one_form(q, k, v)):
        from ._plain import attention

        return attention(q, k, v, softmax_scale, window, dropout_p, with_lse)
    if refusal is not None:
        raise NotImplementedError(refusal)
    check(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in rows(q, k, v))
    out, lse = attend(q, k, v, number(softmax_scale), window, True, with_lse, high)
    return out.transpose(1, 2), lse if with_lse else None


def rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose last dimension is contiguous: others are copied, as FlashAttention's functions do."""
    # `contiguous` would leave a single column as it lies.
    return tuple(x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format) for x in tensors)


def refusal_of(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
    """Why evosdpa does not compute this; ``None`` when it does."""
    if dropout_p != 0.0:
        return _words.dropout(dropout_p)
    if is_differentiated(q, k, v):
        return _words.autograd()
    if q.dtype not in CODES:
        return _words.dtype(q.dtype)
    if q.is_cuda:
        largest = _native.GPU_HEAD_DIM_MAX_F32 if q.dtype == torch.float32 else _native.GPU_HEAD_DIM_MAX
        if q.size(-1) > largest or v.size(-1) > largest:
            return _words.dim_on_gpu(max(q.size(-1), v.size(-1)), q.dtype, largest)
    elif q.device.type != "cpu":
        return _words.device(q.device)
    for x in (q, k, v):
        if x.is_nested or x.layout != torch.strided:
            return _words.layout("nested" if x.is_nested else x.layout)
    if q.dim() not in (3, 4):
        return f"{_words.dimensions(q.dim())}, {_words.FALLBACK}"
    if not compiling() and any(x._is_zerotensor() for x in (q, k, v)):
        return _words.layout("of zeros without memory")
    return None


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether somebody wants the gradient of one of them, backwards or forwards."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return not compiling() and _forward_ad._current_level >= 0 and any(_unpacked(x).tangent is not None for x in tensors)


def takes(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None) -> bool:
    """Whether evosdpa computes a call of a model, whose heads may be shared."""
    return _can_take(q, k, v, scale, True, refusal_of(q, k, v, dropout_p))


def _can_take(q: Tensor, k: Tensor, v: Tensor, scale: Any, enable_gqa: bool, refusal: str | None) -> bool:
    """The one rule of what stays here where torch stands by: what evosdpa has and the library takes as it is. All else is
    torch's, to compute it or to say what is wrong."""
    if refusal is not None or not _have_one_form(q, k, v) or not _fit(q, k, v, enable_gqa):
        return False
    if compiling():
        return not is_transformed()
    if not (scale is None or (type(scale) in (float, int) and abs(scale) <= _FLOAT32_MAX and (scale >= 0 or not q.is_cuda))):
        return False
    if _watched() > 0 or _overridden() > 0 or _traced() is not None or _transformed() is not None:
        return False
    return all(_is_plain(x) and x.data_ptr() % x.element_size() == 0 for x in (q, k, v))


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is memory and nothing else; while compiling all look so."""
    return compiling() or (type(x) in _PLAIN and _is_dense(x))


def _have_one_form(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.dim() == k.dim() == v.dim()
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and all(holds(x.stride(-1) == 1) and holds(x.size(-1) > 0) and holds(x.size(-1) <= _native.HEAD_DIM_MAX) for x in (q, k, v))
    )


def _fit(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Sizes that need neither spreading nor a word about them."""
    heads, shared = q.size(-3), k.size(-3)
    return (
        are_same(q.shape[:-3], k.shape[:-3])
        and are_same(k.shape[:-1], v.shape[:-1])
        and holds(q.size(-1) == k.size(-1))
        and (holds(heads == shared) or holds(shared == 1) or (enable_gqa and holds(shared > 0) and holds(heads % shared == 0)))
        and holds(q.numel() > 0)
        and holds(k.numel() > 0)
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast torch computes attention in the lower precision, and takes a mask in it too."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    lower = torch.get_autocast_dtype(kind)
    return tuple(x.to(lower) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _meaning(attn_mask: Any, is_causal: bool, q: Tensor, k: Tensor) -> tuple[_window.Window, Any]:
    """What queries see, and what of the mask that does not say."""
    if attn_mask is None or is_causal:
        return (_window.CAUSAL if is_causal else _window.FULL), attn_mask
    window = _window_of(attn_mask, q, k)
    return (_window.FULL, attn_mask) if window is None else (window, None)


def _window_of(attn_mask: Any, q: Tensor, k: Tensor) -> _window.Window | None:
    """torch's masks that are a name and not numbers; ``None`` for those that are numbers."""
    known = sys.modules.get("torch.nn.attention.bias")
    if known is None or compiling() or type(attn_mask) is not known.CausalBias:
        return None
    queries, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if (queries, keys) != (q.size(-2), k.size(-2)) or queries > keys:
        return None  # torch says what is wrong, or gives NaN to queries that see no key
    return (-1, 0, attn_mask.variant == known.CausalVariant.LOWER_RIGHT)


def is_known_mask(attn_mask: Any) -> bool:
    """Whether a mask is memory, or one of torch's that :func:`_window_of` reads."""
    if type(attn_mask) in _PLAIN or compiling():
        return type(attn_mask) in _PLAIN
    known = sys.modules.get("torch.nn.attention.bias")
    return known is not None and type(attn_mask) is known.CausalBias


def number(scale: Any) -> float | None:
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise TypeError(_words.number_with_gradient())
        if scale.numel() != 1:
            raise TypeError(f"a scale or softcap is a tensor of shape {list(scale.shape)}; give one number")
        return float(scale)
    return cast("float | None", scale)


def is_transformed() -> bool:
    """Whether this is within ``torch.vmap``, ``torch.func.grad`` or another transform. A compiler does not know the stack to be ``None``."""
    return isinstance(_transformed(), _Interpreter)


def is_memory(*tensors: Tensor) -> bool:
    """Whether nobody watches operators, and tensors are what they look like."""
    watched = _watched() > 0 or _overridden() > 0 or _transformed() is not None or _traced() is not None
    return not watched and all(type(x) in _PLAIN for x in tensors)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: _window.Window,
    by_sequence: bool,
    with_lse: bool,
    high: bool,
    side: _side.Side | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Through the operator where somebody watches operators, else straight to the native side."""
    if compiling() or not is_memory(q, k, v) or _profiling():
        if any(type(x).__name__ == "DTensor" for x in (q, k, v)):
            shard_on_demand()
        side = {name: value for name, value in (side or {}).items() if name != "fast"}  # whoever watches can wait
        out, lse = torch.ops.evosdpa.forward(q, k, v, scale, *window, by_sequence, with_lse, high, **side)
        return out, lse
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    return compute(q, k, v, scale, window, by_sequence, with_lse, high, side)


# The compiler library for GPU kernels is where torch has it.
_native.suggest_packages(str(pathlib.Path(torch.__file__).parents[1]))
