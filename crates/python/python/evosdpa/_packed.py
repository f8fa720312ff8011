"""Packed sequences in models of transformers: those that a collator packs, and those of continuous batching.

``generate_batch`` lays the tokens of all requests one behind the other and keeps keys and values in a cache of pages. It asks
for the name of an implementation that it knows; :func:`join` adds evosdpa's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from . import _blocks, _deferred, _words
from ._flash import flash_attn_varlen_func

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
#: The longest of queries and keys: continuous batching of transformers 5.17, for one, has the second names.
_LONGEST = (("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k"))


def has_lengths(named: dict[str, Any]) -> bool:
    """Whether cumulative lengths are given, which say where sequences are."""
    return all(isinstance(named.get(name), Tensor) for name in _LENGTHS)


def pattern_of(mask: Tensor | None, cache: Any, causal: bool, named: dict[str, Any]) -> _deferred.Pattern | None:
    """What each sequence sees of its own tokens; ``None`` where a mask says more. With a cache of continuous batching a mask is one of the
    model's own, which knows nothing of the requests."""
    if cache is None and mask is not None:
        return mask.facts.within_sequences() if isinstance(mask, _deferred.DeferredMask) else None
    window = named.get("sliding_window") if causal else None
    return _deferred.Pattern(None if window is None else window - 1, 0 if causal else None)


def written_out(mask: Any, pattern: _deferred.Pattern | None, batch: int, queries: int, keys: int, named: dict[str, Any]) -> Any:
    """A dense mask that keeps sequences apart, for calls that are not computed sequence by sequence. Tokens of a batch count one behind
    the other, as for flash attention."""
    if mask is not None and _blocks.is_block_mask(mask):
        return mask
    cu_seqlens_q, cu_seqlens_k = (named[name].long() for name in _LENGTHS)
    if batch > 1:
        for name, cu, count in zip(_LENGTHS, (cu_seqlens_q, cu_seqlens_k), (queries, keys)):
            if not {count * row for row in range(batch + 1)} <= set(cu.tolist()) or int(cu[-1]) != batch * count:
                raise NotImplementedError(_words.across_rows(name, batch, count))
    last = len(cu_seqlens_q) - 2
    row, key = (torch.arange(batch * count, device=cu_seqlens_q.device) for count in (queries, keys))
    of_row, of_key = (torch.bucketize(place, cu[1:], right=True) for place, cu in ((row, cu_seqlens_q), (key, cu_seqlens_k)))
    # Positions count from each sequence's first key; its last query is at its last key.
    row = row - (cu_seqlens_q[1:] - cu_seqlens_k[1:])[of_row.clamp(max=last)] - cu_seqlens_k[of_row.clamp(max=last)]
    key = key - cu_seqlens_k[of_key.clamp(max=last)]
    of_row, row = (x.view(batch, queries, 1) for x in (of_row, row))
    of_key, key = (x.view(batch, 1, keys) for x in (of_key, key))
    seen = (of_row == of_key) & (of_key <= last)
    if pattern is None:
        mask = mask.dense() if isinstance(mask, _deferred.DeferredMask) else mask
        if mask is None or mask.dtype == torch.bool:
            return seen[:, None] if mask is None else mask & seen[:, None]
        return mask.masked_fill(~seen[:, None], torch.finfo(mask.dtype).min)
    if pattern.left is not None:
        seen &= key >= row - pattern.left
    if pattern.right is not None:
        seen &= key <= row + pattern.right
    return seen[:, None]


def _update(cache: Any, module: torch.nn.Module, key: Tensor, value: Tensor, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Writes the new keys and values, returns all that sequences read, and picks the lengths of this layer."""
    new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if "kwargs" in inspect.signature(cache.update).parameters:
        key, value = cache.update(**new, kwargs=named)
        return key, value
    # Transformers 5.17, for one, wants the indices by name, leaves the lengths of each kind of layer, and returns tokens first.
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    named.update({name: given[kind] for name, given in named.items() if isinstance(given, dict) and kind in given})
    key, value = cache.update(**new, read_index=named["read_index"], write_index=named["write_index"])
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    pattern: _deferred.Pattern,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    named: dict[str, Any],
) -> Tensor:
    """Attention of one layer, ``[1, heads, tokens, head dimension]`` in, ``[1, tokens, heads, …]`` out."""
    if cache is not None:
        if named.get("block_table") is not None:
            raise NotImplementedError("continuous batching with a block table is for flash-attention's own name; leave max_blocks_per_request at 0")
        key, value = _update(cache, module, key, value, named)
    left, right = (-1 if bound is None else bound for bound in pattern[:2])
    cu_seqlens_q, cu_seqlens_k = (named[name] for name in _LENGTHS)
    longest = [next((int(named[name]) for name in names if named.get(name) is not None), None) for names in _LONGEST]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        *longest,
        softmax_scale=scaling,
        window_size=(left, right),
        softcap=softcap or 0.0,
        s_aux=s_aux,
    )
    return out[None]


def join(name: str) -> None:
    """Lets continuous batching keep the implementation of this name, where this transformers has it."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

        before = Manager.switch_to_cb_friendly_attn
    except (ImportError, AttributeError):
        return
    if getattr(before, "keeps", None) == name:
        return

    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if model.config._attn_implementation == name:
            return None
        return before(self, model, *arguments, **named)

    setattr(switch_to_cb_friendly_attn, "keeps", name)
    setattr(Manager, "switch_to_cb_friendly_attn", switch_to_cb_friendly_attn)
