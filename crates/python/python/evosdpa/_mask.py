"""Dense masks of torch: what is added to scores, or which keys a query sees.

A mask may have any shape that spreads to ``[batch, heads, queries, keys]`` and any strides. Booleans say which keys are seen;
numbers are added to the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _side, _words
from ._sizes import holds


def objection(mask: object, q: Tensor, k: Tensor) -> Exception | None:
    """Why a mask that nobody differentiates cannot be taken; ``None`` when it can. ``q`` and ``k`` have three or four dimensions."""
    if not isinstance(mask, Tensor):
        return TypeError(f"attn_mask is a {type(mask).__name__}; give a tensor")
    if mask.is_nested or mask.layout != torch.strided:
        return NotImplementedError(_words.layout("nested" if mask.is_nested else mask.layout))
    if k.dim() != q.dim():
        return ValueError(_words.dimensions(k.dim()))
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return TypeError(_words.mask_dtype(mask.dtype, q.dtype))
    if mask.device != q.device:
        return ValueError(f"attn_mask is on {mask.device}, but q is on {q.device}; move it there")
    scores = (*(max(a, b) for a, b in zip(q.shape[:-3], k.shape[:-3])), q.size(-3), q.size(-2), k.size(-2))
    if not _spreads(mask, scores):
        return ValueError(_words.mask_shape(tuple(mask.shape), scores))
    return None


def beside(mask: Tensor, keys: int) -> _side.Side:
    """A mask that nobody objected to, as the native side takes it: four dimensions, of which the last is contiguous."""
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    for dim in range(3):
        if holds(mask.stride(dim) == 0) and holds(mask.size(dim) > 1):
            mask = mask.narrow(dim, 0, 1)  # what repeats itself is said once
    mask = mask.expand(-1, -1, -1, keys)
    if not (holds(mask.stride(3) == 1) or holds(keys <= 1)):
        mask = mask.contiguous()
    has_memory = not torch.compiler.is_compiling() and not getattr(torch._C, "_functorch").is_batchedtensor(mask)
    if has_memory and mask.data_ptr() % mask.element_size():
        mask = mask.clone()
    return {"mask" if mask.dtype == torch.bool else "bias": mask}


def _spreads(mask: Tensor, scores: tuple[int, ...]) -> bool:
    if mask.dim() > len(scores):
        return False
    return all(holds(size == wanted) or holds(size == 1) for size, wanted in zip(reversed(mask.shape), reversed(scores)))
