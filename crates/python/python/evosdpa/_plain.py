"""FlashAttention's function in plain torch operations: for what evosdpa does not compute, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _window


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    window: _window.Window,
    dropout_p: float,
    with_lse: bool,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    chunk: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Tensors are ``[batch, sequence, heads, head dimension]``; scores are written out whole, in float32."""
    queries, keys, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right, _ = window
    own = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
    distance = torch.arange(keys, device=q.device)[None, :] - own
    if alibi_slopes is not None:
        slopes = alibi_slopes.float().reshape(-1, q.size(2), 1, 1)
        scores = scores - slopes * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    if chunk:
        hidden |= own.div(chunk, rounding_mode="floor") != (own + distance).div(chunk, rounding_mode="floor")
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        aside = sinks.float().reshape(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, aside], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # A query that sees no key gives zeros, not the NaN of 0/0.
    weights = torch.softmax(scores, dim=-1)[..., :keys].masked_fill(hidden, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype)
    return out, lse if with_lse else None
