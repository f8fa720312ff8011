"""Packed sequences in models of transformers: those that a collator packs, and those of continuous batching.

``generate_batch`` lays the tokens of all requests one behind the other and keeps keys and values in a cache of pages. It asks
for the name of an implementation that it knows; :func:`join` adds evosdpa's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ._flash import flash_attn_varlen_func

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
#: The longest of queries and keys: continuous batching of transformers 5.17, for one, has the second names.
_LONGEST = (("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k"))


def is_packed(query: Tensor, attention_mask: Tensor | None, cache: Any, named: dict[str, Any]) -> bool:
    """Whether a call says by cumulative lengths, and not by a mask, where its sequences are. With a cache of continuous
    batching a mask is one of the model's own, which knows nothing of the requests."""
    if query.shape[0] != 1:
        return False
    return cache is not None or (attention_mask is None and has_lengths(named))


def has_lengths(named: dict[str, Any]) -> bool:
    """Whether cumulative lengths are given."""
    return all(isinstance(named.get(name), Tensor) for name in _LENGTHS)


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
    causal: bool,
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
    window = named.get("sliding_window")
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
        causal=causal,
        window_size=(-1, -1) if window is None or not causal else (window - 1, 0),
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
