"""Block masks of torch's FlexAttention: which blocks of keys each block of queries sees.

Whole blocks become a table of bytes, by which kernels leave out the tiles that nobody sees. Of the others the ``mask_mod`` decides:
it is worked out once, into a boolean mask beside the table.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

from . import _side

#: Blocks of other sizes are written out: kernels have tiles of so many rows and keys.
_STEP = 64
#: The most bytes that are written out.
_MOST = 1 << 30


def is_block_mask(mask: object) -> bool:
    known = sys.modules.get("torch.nn.attention.flex_attention")
    return known is not None and isinstance(mask, known.BlockMask)


def beside(mask: Any, q: Tensor, k: Tensor) -> _side.Side:
    """A block mask as the native side takes it. ``q`` and ``k`` are ``[batch, heads, sequence, head dimension]``. What was worked out
    stays with the mask, which models use for all their layers."""
    _check(mask, q, k)
    known = getattr(mask, "_evosdpa_side", None)
    if known is None or torch.compiler.is_compiling():
        known = _worked_out(mask, q.size(2), k.size(2))
        mask._evosdpa_side = known
    return cast(_side.Side, known)


def _check(mask: Any, q: Tensor, k: Tensor) -> None:
    batch, heads, rows, columns = mask.kv_indices.shape
    sizes = (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1])
    wanted = (-(-q.size(2) // sizes[0]), -(-k.size(2) // sizes[1]))
    lengths = getattr(mask, "seq_lengths", None) or (q.size(2), k.size(2))
    if (rows, columns) != wanted or tuple(lengths) != (q.size(2), k.size(2)):
        raise ValueError(
            f"attn_mask is a BlockMask of {rows}x{columns} blocks of {sizes[0]}x{sizes[1]}, "
            f"but there are {q.size(2)} queries and {k.size(2)} keys; make it for these"
        )
    if batch not in (1, q.size(0)) or heads not in (1, q.size(1)):
        raise ValueError(
            f"attn_mask is a BlockMask for a batch of {batch} and {heads} heads, but q has {q.size(0)} and {q.size(1)}; "
            "make it for these, or for one of each"
        )
    if mask.kv_indices.device != q.device:
        raise ValueError(f"attn_mask is on {mask.kv_indices.device}, but q is on {q.device}; move it there")


def _worked_out(mask: Any, queries: int, keys: int) -> _side.Side:
    partial = _table(mask.kv_num_blocks, mask.kv_indices)
    full = None if mask.full_kv_num_blocks is None else _table(mask.full_kv_num_blocks, mask.full_kv_indices)
    seen = partial if full is None else partial | full
    # One block may be as large as all there is.
    sizes = [min(size, -(-length // _STEP) * _STEP) for size, length in zip(mask.BLOCK_SIZE, (queries, keys))]
    in_steps = all(size % _STEP == 0 for size in sizes)
    side: _side.Side = {}
    if in_steps:
        side = {"blocks": seen.to(torch.uint8).contiguous(), "block_q": sizes[0], "block_k": sizes[1]}
    decides = not _is_noop(mask.mask_mod) and bool(partial.any())
    if decides or not in_steps:
        side["mask"] = _written_out(mask, partial, full, decides, queries, keys)
    return side


def _table(counts: Tensor, indices: Tensor) -> Tensor:
    """Booleans for lists of blocks, of which the first so many count."""
    columns = indices.size(-1)
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    # What is not listed goes to a column of its own.
    return table.scatter(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _is_noop(mask_mod: Any) -> bool:
    from torch.nn.attention.flex_attention import noop_mask

    return getattr(mask_mod, "fn", mask_mod) is noop_mask


def _written_out(mask: Any, partial: Tensor, full: Tensor | None, decides: bool, queries: int, keys: int) -> Tensor:
    batch, heads = partial.shape[:2]
    if batch * heads * queries * keys > _MOST:
        what = "has partial blocks" if decides else f"has blocks of {mask.BLOCK_SIZE[0]}x{mask.BLOCK_SIZE[1]}"
        raise NotImplementedError(
            f"attn_mask is a BlockMask that {what}, which written out would take {batch * heads * queries * keys >> 20} MiB; "
            f"evosdpa takes up to {_MOST >> 20} MiB, and any number of full blocks of multiples of {_STEP}"
        )

    def spread(table: Tensor) -> Tensor:
        rows = table.repeat_interleave(mask.BLOCK_SIZE[0], 2)[:, :, :queries] if table.size(2) > 1 else table
        return rows.repeat_interleave(mask.BLOCK_SIZE[1], 3)[..., :keys] if table.size(3) > 1 else rows

    seen = spread(partial)
    if decides:
        from torch.nn.attention.flex_attention import create_mask

        seen = seen & create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(partial.device))
    if full is not None:
        seen = seen | spread(full)
    return seen.expand(-1, -1, queries, keys).contiguous()
