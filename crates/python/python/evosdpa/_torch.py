"""PyTorch: the fast path, the operator, and what is left to torch itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from . import _native, _window, _words

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    fallback: bool,
) -> Tensor:
    refusal = _words.dense_mask() if attn_mask is not None else _refusal(q, k, v, dropout_p)
    if fallback and (refusal is not None or not _expressible(q, k, v)):
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
    out, _ = _attend(q, k, v, scale, _window.CAUSAL if is_causal else _window.FULL, by_sequence, False)
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
    fallback: bool,
) -> tuple[Tensor, Tensor | None]:
    refusal = _refusal(q, k, v, dropout_p)
    refusal = refusal or (_words.extra("softcap") if softcap else None)
    refusal = refusal or (_words.extra("alibi_slopes") if alibi_slopes is not None else None)
    window = _window.flash_window(causal, window_size)
    if fallback and (refusal is not None or not _expressible(q, k, v)):
        from ._plain import attention

        return attention(q, k, v, softmax_scale, window, dropout_p, softcap, alibi_slopes, with_lse)
    if refusal is not None:
        raise NotImplementedError(refusal)
    _check(q, k, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = _attend(q, k, v, softmax_scale, window, True, with_lse)
    return out.transpose(1, 2), lse if with_lse else None


def _refusal(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
    """Why evosdpa does not compute this; ``None`` when it does."""
    if dropout_p != 0.0:
        return _words.dropout(dropout_p)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _words.autograd()
    if q.dtype not in _CODES:
        return _words.dtype(q.dtype)
    if q.device.type not in _DEVICES:
        return _words.device(q.device)
    if q.dim() not in (3, 4):
        return _words.dimensions(q.dim())
    return None


def _expressible(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library would take these tensors: asked only where torch stands by."""
    return (
        q.dim() == k.dim() == v.dim()
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and all(x.stride(-1) == 1 and 0 < x.size(-1) <= 512 for x in (q, k, v))
    )


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the native side cannot see."""
    for x in (q, k, v):
        if x.dim() != 4:
            raise ValueError(_words.dimensions(x.dim()))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}; convert them to one type")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: _window.Window, by_sequence: bool, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Through the operator where somebody watches operators, else straight to the native side."""
    if (
        torch.compiler.is_compiling()
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    ):
        return torch.ops.evosdpa.forward(q, k, v, scale, *window, by_sequence, with_lse)
    return forward(q, k, v, scale, *window, by_sequence, with_lse)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    by_sequence: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The operator's work on real memory."""
    out, lse = _outputs(q, v, by_sequence, with_lse)
    if out.numel() == 0 or k.size(2) == 0:
        # Nobody sees a key.
        return out.zero_(), lse.fill_(-torch.inf)
    lse_address = lse.data_ptr() if with_lse else 0
    operands = (
        (q.data_ptr(), q.shape, q.stride()),
        (k.data_ptr(), k.shape, k.stride()),
        (v.data_ptr(), v.shape, v.stride()),
        (out.data_ptr(), out.shape, out.stride()),
    )
    window = (window_left, window_right, bottom_right)
    if q.is_cuda:
        raise NotImplementedError(_words.device(q.device))
    _native.forward_cpu(_CODES[q.dtype], *operands, lse_address, scale, window, torch.get_num_threads())
    return out, lse


def _outputs(q: Tensor, v: Tensor, by_sequence: bool, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Memory from torch's allocator; real or fake, as the inputs are."""
    batch, heads, queries, _ = q.shape
    dim = v.size(3)
    if by_sequence:
        strides = (queries * heads * dim, dim, heads * dim, 1)
    else:
        strides = (heads * queries * dim, queries * dim, dim, 1)
    out = torch.empty_strided((batch, heads, queries, dim), strides, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries) if with_lse else (0,), dtype=torch.float32, device=q.device)
    return out, lse


def _fake(q, k, v, scale, window_left, window_right, bottom_right, by_sequence, with_lse):  # type: ignore[no-untyped-def]
    _check(q, k, v)
    return _outputs(q, v, by_sequence, with_lse)


def _no_backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise NotImplementedError(_words.autograd())


# The library object must live as long as the operator.
_LIBRARY = torch.library.Library("evosdpa", "DEF")
_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, float? scale, int window_left, int window_right, bool bottom_right, "
    "bool by_sequence, bool with_lse) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", forward, _key)
torch.library.register_fake("evosdpa::forward", _fake, lib=_LIBRARY)
torch.library.register_autograd("evosdpa::forward", _no_backward, lib=_LIBRARY)
