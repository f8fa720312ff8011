"""The operator ``torch.ops.evosdpa.forward``: what compilers, modes, transforms and profilers of torch see."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from . import _native, _side, _window, _words

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# With the codes of 8-bit types, which need scales.
ALL_CODES = {getattr(torch, name): code for name, code in _side.CODES.items()}
_threads = torch.get_num_threads
_unpacked: Any = _forward_ad.unpack_dual
# Builds of torch without CUDA have no such function, and no such tensors either.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def compute(
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
    """Attention of real 4-D tensors ``[batch, heads, sequence, head dimension]``, packed or paged as ``side`` says."""
    dtype = _output_dtype(q)
    out = _output(q, v, by_sequence, dtype)
    lse = _lse(q) if with_lse else None
    native = held = None
    if side:
        native, held = _side.described(side, described, str(q.device))
        if k.dtype != q.dtype:
            native["kv_dtype"] = ALL_CODES[k.dtype]
        if dtype != q.dtype:
            native["o_dtype"] = CODES[dtype]
    if _side.sees_nothing(native, out.numel() if lse is None else lse.numel(), k.size(2)):
        if out.numel() and not q.is_cuda:  # of a GPU's lengths nothing is known here
            _side.check_unused(side)
        out.zero_()
        if lse is not None and side is not None and (sinks := side.get("sinks")) is not None and not _side.has_no_sequence(native):
            lse.copy_(sinks[:, None])
        elif lse is not None:
            lse.fill_(-torch.inf)
        return out, lse
    operands = (
        (q.data_ptr(), q.shape, q.stride()),
        (k.data_ptr(), k.shape, k.stride()),
        (v.data_ptr(), v.shape, v.stride()),
        (out.data_ptr(), out.shape, out.stride()),
    )
    lse_address = 0 if lse is None else lse.data_ptr()
    if side and is_checked(q):
        check_lists(q, k, v, side)
    _native.forward(ALL_CODES[q.dtype], *operands, lse_address, scale, window, high, *place(q), native)
    del held  # had to live until here
    return out, lse


def place(x: Tensor) -> tuple[int, int]:
    """On a GPU, its number and the current stream; on a CPU -1 and the threads."""
    ordinal = x.get_device()
    return ordinal, _current_stream(ordinal) if x.is_cuda else _threads()


def is_checked(x: Tensor) -> bool:
    """Whether lists that only a GPU knows are to be copied and checked."""
    return x.is_cuda and os.environ.get("EVOSDPA_CHECK") == "1"


def check_lists(q: Tensor, k: Tensor, v: Tensor, side: _side.Side) -> None:
    """Refuses lengths past the tensors and pages that are not there. On a GPU only the device knows them: this copies them,
    and waits for it."""
    copies = {name: side[name].cpu() for name in _side.INTEGERS if side.get(name) is not None}
    longest = {name: side.get(name) for name in ("max_seqlen_q", "max_seqlen_k")}
    native, held = _side.described({**copies, **longest}, described, "cpu")
    first, second, third = ((0, tuple(x.shape), x.stride()) for x in (q, k, v))
    _native.check_lists(CODES[_output_dtype(q)], first, second, third, native)
    del held  # had to live until here


def check(q: Tensor, k: Tensor, v: Tensor, own_types: bool = False) -> None:
    """What the native side cannot see. With ``own_types`` keys and values may be of another type than queries."""
    for x in (q, k, v):
        if x.dim() != 4:
            raise ValueError(_words.dimensions(x.dim()))
    if k.dtype != v.dtype or (q.dtype != k.dtype and not own_types):
        raise TypeError(f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}; convert them to one type")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")


def shard_on_demand() -> None:
    """Makes the operator known to DTensor, which is only imported by those who use it. Batches and heads may be split:
    each is computed alone."""
    global _sharded
    if _sharded:
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.evosdpa.forward.default)  # type: ignore[untyped-decorator]
    def _shardings(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> list[tuple[list[Any], list[Any]]]:
        with_lse = bool(rest[5])
        choices: list[tuple[list[Any], list[Any]]] = []
        # What is beside Q, K and V would have to be split with them.
        for place in (Replicate(),) if _named(rest[7:], named) else (Replicate(), Shard(0), Shard(1)):
            # Without it the second output is empty, and the same everywhere.
            lse = place if with_lse else Replicate()
            choices.append(([place, lse], [place, place, place, *(None for _ in rest)]))
        return choices

    _sharded = True


def described(tensor: Tensor) -> _side.Described:
    name = str(tensor.dtype).removeprefix("torch.")
    return _side.Described(tensor, name, str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _output_dtype(q: Tensor) -> torch.dtype:
    """That of the queries; bfloat16 where they are codes, as FlashAttention-3 has it."""
    return q.dtype if q.dtype in CODES else torch.bfloat16


def _output(q: Tensor, v: Tensor, by_sequence: bool, dtype: torch.dtype) -> Tensor:
    """Memory from torch's allocator; real or fake, as the inputs are."""
    batch, heads, queries, _ = q.shape
    dim = v.size(3)
    if by_sequence:
        strides = (queries * heads * dim, dim, heads * dim, 1)
    else:
        strides = (heads * queries * dim, queries * dim, dim, 1)
    return torch.empty_strided((batch, heads, queries, dim), strides, dtype=dtype, device=q.device)


def _lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _no_lse(q: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _forward(q, k, v, scale, window_left, window_right, bottom_right, by_sequence, with_lse, high=False, *values, **named):  # type: ignore[no-untyped-def]
    """The operator, which has two outputs whatever was asked for."""
    side = _named(values, named)
    check(q, k, v, bool(side))
    window = (window_left, window_right, bottom_right)
    out, lse = compute(q, k, v, scale, window, by_sequence, with_lse, high, side)
    return out, _no_lse(q) if lse is None else lse


def _fake(q, k, v, scale, window_left, window_right, bottom_right, by_sequence, with_lse, high=False, *values, **named):  # type: ignore[no-untyped-def]
    check(q, k, v, bool(_named(values, named)))
    return _output(q, v, by_sequence, _output_dtype(q)), _lse(q) if with_lse else _no_lse(q)


def _named(values: tuple[object, ...], named: _side.Side) -> _side.Side:
    """The operator's side inputs, which torch passes by place, by name, and what is there of them."""
    return {name: value for name, value in (*zip(_SIDE, values), *named.items()) if value is not None}


class _Refused(torch.autograd.Function):
    """What somebody may differentiate: that it cannot be is said to those who do."""

    @staticmethod
    def forward(ctx, compute, *given):  # type: ignore[no-untyped-def]
        return compute(*given)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        raise NotImplementedError(_words.autograd())


def refusing_gradients(name: str) -> Callable[..., Any]:
    """What stands between the dispatcher and an operator's kernels. Forward-mode tangents would be left out without a word."""

    def autograd(keyset: Any, *given: Any) -> Any:
        def compute(*given: Any) -> Any:
            core: Any = torch._C
            with core._AutoDispatchBelowAutograd():
                operator = getattr(torch.ops.evosdpa, name).default
                return operator.redispatch(keyset & core._after_autograd_keyset, *given)

        tensors = [x for x in given if isinstance(x, Tensor)]
        if _forward_ad._current_level >= 0 and any(_unpacked(x).tangent is not None for x in tensors):
            raise NotImplementedError(_words.without_fallback(_words.autograd()))
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return compute(*given)
        if getattr(torch._C, "_functorch").peek_interpreter_stack() is not None:
            raise NotImplementedError(_words.without_fallback(_words.autograd()))
        return cast(Any, _Refused).apply(compute, *given)

    return autograd


def _vmapped(info, in_dims, q, k, v, *rest, **named):  # type: ignore[no-untyped-def]
    """``torch.vmap``: one more batch dimension."""
    side = _named(rest[7:], named)
    if any(isinstance(value, Tensor) for value in side.values()):
        raise NotImplementedError(_words.vmap(next(name for name in side if isinstance(side[name], Tensor))))
    count = info.batch_size
    tensors = [
        (x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)) for x, dim in zip((q, k, v), in_dims)
    ]
    # Each call may spread its own batch; together they must agree.
    batch = max(x.size(1) for x in tensors)
    tensors = [x.expand(count, batch, *x.shape[2:]) if x.size(1) == 1 else x for x in tensors]
    out, lse = torch.ops.evosdpa.forward(*(x.flatten(0, 1) for x in tensors), *rest[:7], **side)
    with_lse = rest[5]
    if not with_lse:
        return (out.unflatten(0, (count, batch)), lse), (0, None)
    return (out.unflatten(0, (count, batch)), lse.unflatten(0, (count, batch))), (0, 0)


def _flops(q_shape, k_shape, v_shape, *rest, out_shape=None, **named):  # type: ignore[no-untyped-def]
    """Two multiply-adds an element of the scores, as torch counts its own attention: hidden keys included."""
    batch, heads, queries, dim = q_shape
    return 2 * batch * heads * queries * k_shape[2] * (dim + v_shape[3])


_sharded = False

# Side inputs of the operator, in its order.
_SIDE = {
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "max_seqlen_q": "SymInt?",
    "max_seqlen_k": "SymInt?",
    "seqused_q": "Tensor?",
    "seqused_k": "Tensor?",
    "leftpad_k": "Tensor?",
    "cache_batch_idx": "Tensor?",
    "page_table": "Tensor?",
    "bias": "Tensor?",
    "mask": "Tensor?",
    "blocks": "Tensor?",
    "block_q": "SymInt?",
    "block_k": "SymInt?",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "q_scales": "Tensor?",
    "k_scales": "Tensor?",
    "v_scales": "Tensor?",
    "scales_per": "str?",
    "softcap": "float?",
    "chunk": "SymInt?",
}

# The library object must live as long as the operator.
_library: Any = torch.library  # of which not all is typed
_LIBRARY = _library.Library("evosdpa", "DEF")
_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, float? scale, int window_left, int window_right, bool bottom_right, "
    "bool by_sequence, bool with_lse, bool high=False, "
    + ", ".join(f"{kind} {name}=None" for name, kind in _SIDE.items())
    + ") -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _key)
torch.library.register_fake("evosdpa::forward", _fake, lib=_LIBRARY)
_LIBRARY.impl("forward", refusing_gradients("forward"), "Autograd", with_keyset=True)
if hasattr(torch.library, "register_vmap"):  # 2.5 on
    torch.library.register_vmap("evosdpa::forward", _vmapped, lib=_LIBRARY)
# It says so when there is no Triton, which is no news to people who do not count.
_log = logging.getLogger("torch.utils.flop_counter")
_said, _log.disabled = _log.disabled, True
try:
    from torch.utils.flop_counter import register_flop_formula
except ImportError:  # before 2.3
    pass
else:
    register_flop_formula(torch.ops.evosdpa.forward)(_flops)
finally:
    _log.disabled = _said
