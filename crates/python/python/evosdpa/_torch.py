"""PyTorch: the fast path, the operator, and what is left to torch itself."""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from . import _native, _side, _window, _words

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# With the codes of 8-bit types, which need scales.
_ALL_CODES = {getattr(torch, name): code for name, code in _side.CODES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Asked at every call.
_watched = torch._C._len_torch_dispatch_stack
_traced = torch._C._get_tracing_state
_differentiating = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_empty_like = torch.empty_like
_threads = torch.get_num_threads
# Builds of torch without CUDA have no such function, and no such tensors either.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Newer versions of torch (2.10 on) describe a tensor by one C call; with older ones every call goes the long way.
_EXCHANGED = hasattr(Tensor, "__dlpack_c_exchange_api__") and _native.use_exchange(Tensor.__dlpack_c_exchange_api__)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    high: bool,
    fallback: bool,
) -> Tensor:
    window = _window.CAUSAL if is_causal else _window.FULL
    refusal = _words.dense_mask() if attn_mask is not None else refusal_of(q, k, v, dropout_p)
    if fallback and is_left_to_torch(q, k, v, refusal):
        return torch_sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError(_words.mask_twice())
    if refusal is not None:
        raise NotImplementedError(refusal)
    three = q.dim() == 3
    if three:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    _check(q, k, v)
    if q.size(1) != k.size(1) and k.size(1) != 1 and not enable_gqa:
        raise ValueError(_words.heads(q.size(1), k.size(1)))
    if not q.size(0) == k.size(0) == v.size(0):
        batch = max(q.size(0), k.size(0), v.size(0))
        q, k, v = (x.expand(batch, -1, -1, -1) if x.size(0) == 1 else x for x in (q, k, v))
    # The output lies in memory as the queries do, so that a model's next view of it is free.
    by_sequence = q.stride(1) < q.stride(2)
    out, _ = _attend(q, k, v, scale, window, by_sequence, False, high)
    return out.squeeze(0) if three else out


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    dropout_p: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    with_lse: bool,
    high: bool,
    fallback: bool,
) -> tuple[Tensor, Tensor | None]:
    window = _window.flash_window(causal, window_size)
    refusal = refusal_of(q, k, v, dropout_p)
    refusal = refusal or (_words.extra("softcap") if softcap else None)
    refusal = refusal or (_words.extra("alibi_slopes") if alibi_slopes is not None else None)
    if fallback and is_left_to_torch(q, k, v, refusal):
        from ._plain import attention

        return attention(q, k, v, softmax_scale, window, dropout_p, softcap, alibi_slopes, with_lse)
    if refusal is not None:
        raise NotImplementedError(refusal)
    _check(q, k, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = _attend(q, k, v, softmax_scale, window, True, with_lse, high)
    return out.transpose(1, 2), lse if with_lse else None


def straight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: _window.Window,
    enable_gqa: bool,
    flash_layout: bool,
    with_lse: bool,
    high: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """The common case at once: plain tensors of one type and device that no one differentiates or traces. Anything else
    gives ``None``, and the long way finds out what it is. Each question to a tensor costs a tenth of a microsecond or
    more, so none is asked twice."""
    if (
        not _EXCHANGED
        or _compiling()
        or type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or _watched() > 0
        or _traced() is not None
        or (_differentiating() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):
        return None
    return _native.straight(q, k, v, scale, window, enable_gqa, flash_layout, with_lse, high, _threads(), _empty_like)


def refusal_of(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
    """Why evosdpa does not compute this; ``None`` when it does."""
    if dropout_p != 0.0:
        return _words.dropout(dropout_p)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _words.autograd()
    if q.dtype not in _CODES:
        return _words.dtype(q.dtype)
    if q.is_cuda:
        if q.dtype == torch.float32:
            return _words.dtype_on_gpu(q.dtype)
        if q.size(-1) > _native.GPU_HEAD_DIM_MAX or v.size(-1) > _native.GPU_HEAD_DIM_MAX:
            return _words.dim_on_gpu(max(q.size(-1), v.size(-1)), _native.GPU_HEAD_DIM_MAX)
    elif q.device.type != "cpu":
        return _words.device(q.device)
    if q.dim() not in (3, 4):
        return _words.dimensions(q.dim())
    return None


def is_left_to_torch(q: Tensor, k: Tensor, v: Tensor, refusal: str | None) -> bool:
    """The one rule of what goes to torch where it stands by: what evosdpa has not, and tensors that the library would not
    take, so that torch says what is wrong with them or computes them."""
    return refusal is not None or not (
        q.dim() == k.dim() == v.dim()
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and all(x.stride(-1) == 1 and 0 < x.size(-1) <= _native.HEAD_DIM_MAX for x in (q, k, v))
    )


def _check(q: Tensor, k: Tensor, v: Tensor, own_types: bool = False) -> None:
    """What the native side cannot see. With ``own_types`` keys and values may be of another type than queries."""
    for x in (q, k, v):
        if x.dim() != 4:
            raise ValueError(_words.dimensions(x.dim()))
    if k.dtype != v.dtype or (q.dtype != k.dtype and not own_types):
        raise TypeError(f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}; convert them to one type")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")


def _attend(
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
    if (
        _compiling()
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or _watched() > 0
        or _traced() is not None
    ):
        out, lse = torch.ops.evosdpa.forward(q, k, v, scale, *window, by_sequence, with_lse, high, **(side or {}))
        return out, lse
    return compute(q, k, v, scale, window, by_sequence, with_lse, high, side)


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
        native, held = _side.described(side, _described, str(q.device))
        if k.dtype != q.dtype:
            native["kv_dtype"] = _ALL_CODES[k.dtype]
        if dtype != q.dtype:
            native["o_dtype"] = _CODES[dtype]
    no_sequence = native is not None and native.get("cu_seqlens_q", (0, 2))[1] == 1
    no_keys = out.numel() == 0 or no_sequence or (k.size(2) == 0 and not side)
    if no_keys or (native and ("cu_seqlens_q" in native or "seqused_q" in native)):
        # Nobody sees a key, or tokens belong to no sequence.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    if no_keys:
        return out, lse
    operands = (
        (q.data_ptr(), q.shape, q.stride()),
        (k.data_ptr(), k.shape, k.stride()),
        (v.data_ptr(), v.shape, v.stride()),
        (out.data_ptr(), out.shape, out.stride()),
    )
    # On a GPU, its number and the current stream; on a CPU -1 and the threads.
    ordinal = q.get_device()
    queue = _current_stream(ordinal) if q.is_cuda else _threads()
    lse_address = 0 if lse is None else lse.data_ptr()
    _native.forward(_ALL_CODES[q.dtype], *operands, lse_address, scale, window, high, ordinal, queue, native)
    del held  # had to live until here
    return out, lse


def _described(tensor: Tensor) -> _side.Described:
    name = str(tensor.dtype).removeprefix("torch.")
    return _side.Described(tensor, name, str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _output_dtype(q: Tensor) -> torch.dtype:
    """That of the queries; bfloat16 where they are codes, as FlashAttention-3 has it."""
    return q.dtype if q.dtype in _CODES else torch.bfloat16


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


def _forward(q, k, v, scale, window_left, window_right, bottom_right, by_sequence, with_lse, high=False, *values, **named):  # type: ignore[no-untyped-def]
    """The operator, which has two outputs whatever was asked for."""
    side = _named(values, named)
    _check(q, k, v, bool(side))
    window = (window_left, window_right, bottom_right)
    out, lse = compute(q, k, v, scale, window, by_sequence, with_lse, high, side)
    return out, torch.empty(0, dtype=torch.float32, device=q.device) if lse is None else lse


def _fake(q, k, v, scale, window_left, window_right, bottom_right, by_sequence, with_lse, high=False, *values, **named):  # type: ignore[no-untyped-def]
    _check(q, k, v, bool(_named(values, named)))
    lse = _lse(q) if with_lse else torch.empty(0, dtype=torch.float32, device=q.device)
    return _output(q, v, by_sequence, _output_dtype(q)), lse


def _named(values: tuple[object, ...], named: _side.Side) -> _side.Side:
    """The operator's side inputs, which torch passes by place, by name, and what is there of them."""
    return {name: value for name, value in (*zip(_SIDE, values), *named.items()) if value is not None}


def _no_backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise NotImplementedError(_words.autograd())


# The compiler library for GPU kernels is where torch has it.
_native.suggest_packages(str(pathlib.Path(torch.__file__).parents[1]))

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
_LIBRARY = torch.library.Library("evosdpa", "DEF")
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
torch.library.register_autograd("evosdpa::forward", _no_backward, lib=_LIBRARY)
