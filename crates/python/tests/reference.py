"""FlashAttention's functions in plain torch, one sequence at a time, in float64."""

from __future__ import annotations

import itertools

import torch

ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def close(ours, wanted):
    torch.testing.assert_close(ours.double(), wanted, rtol=2 * ROUNDING.get(ours.dtype, 2.0**-20), atol=1e-3 if ours.dtype == torch.bfloat16 else 1e-5)


def attention(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, chunk=0, slopes=None, sinks=None):
    """``(out [queries, heads, dim], lse [heads, queries])`` of one sequence, ``[tokens, heads, dim]``."""
    queries, keys, group = q.size(0), k.size(0), q.size(1) // k.size(1)
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.size(-1) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (position - key).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    if chunk:
        hidden |= position.div(chunk, rounding_mode="floor") != key // chunk
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :keys]
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def rotated(x, cos, sin, positions, interleaved):
    """``[tokens, heads, dim]`` turned at these positions."""
    half = cos.size(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    cos, sin = (angles.double()[positions][:, None] for angles in (cos, sin))
    a, b = first.double() * cos - second.double() * sin, second.double() * cos + first.double() * sin
    turned = torch.stack([a, b], dim=-1).flatten(-2) if interleaved else torch.cat([a, b], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def varlen(q, k, v, lengths_q, lengths_k, used_q=None, used_k=None, **arguments):
    """Packed sequences of these lengths, of which only so many tokens are used. Unused rows are zero and -inf."""
    out = torch.zeros(q.size(0), q.size(1), v.size(2), dtype=torch.float64)
    lse = torch.full((q.size(1), q.size(0)), -torch.inf, dtype=torch.float64)
    start_q = start_k = 0
    for b, (queries, keys) in enumerate(zip(lengths_q, lengths_k)):
        rows = slice(start_q, start_q + (queries if used_q is None else used_q[b]))
        columns = slice(start_k, start_k + (keys if used_k is None else used_k[b]))
        out[rows], lse[:, rows] = attention(q[rows], k[columns], v[columns], **arguments)
        start_q, start_k = start_q + queries, start_k + keys
    return out, lse
