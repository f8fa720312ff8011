"""A GPU MODE answer in Triton: one program for 64 queries, keys in tiles, the softmax kept up to date on the way.

    evosdpa import gpumode examples/submissions/flash_triton.py --device cuda --shape b2h8s1024d64
"""

import torch
import triton
import triton.language as tl

ROWS, KEYS = 64, 64


@triton.jit
def flash(q, k, v, out, scale, queries, keys, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    q_tile = tl.load(q + (head * queries + row[:, None]) * DIM + column, mask=row[:, None] < queries, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, keys, KEYS):
        key = first + tl.arange(0, KEYS)
        there = key < keys
        place = (head * keys + key[:, None]) * DIM + column
        k_tile = tl.load(k + place, mask=there[:, None], other=0.0)
        v_tile = tl.load(v + place, mask=there[:, None], other=0.0)
        scores = tl.where(there, tl.dot(q_tile, tl.trans(k_tile)) * scale, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        kept = tl.exp2(largest - now)
        weights = tl.exp2(scores - now[:, None])
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v_tile.dtype), v_tile, sums * kept[:, None])
        largest = now
    values = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (head * queries + row[:, None]) * DIM + column, values, mask=row[:, None] < queries)


def custom_kernel(data):
    q, k, v = (part.contiguous() for part in data)
    batch, heads, queries, dim = q.shape
    out = torch.empty_like(q)
    scale = dim**-0.5 * 1.4426950408889634
    grid = (triton.cdiv(queries, ROWS), batch * heads)
    flash[grid](q, k, v, out, scale, queries, k.shape[2], dim, ROWS, KEYS)
    return out
