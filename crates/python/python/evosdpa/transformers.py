"""evosdpa in transformers' attention registry.

Importing this module is all there is to do::

    import evosdpa.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="evosdpa")

Padding, sliding windows, attention chunks, static caches, position biases, softcaps and sinks are computed by evosdpa where a
fast kernel takes them, and so are FlexAttention's block masks and the keys that sparse models pick (``indices``), as a mask; dense masks and position biases on a GPU, with which torch is faster, are torch's. What none does (dropout,
gradients, other devices) is computed by torch as before. An argument that this module does not know
is refused by its name: it may change what a model means.

Packed inputs (``cu_seq_lens_q`` and the like, as for flash attention) and continuous batching (``generate_batch``) need no masks.

Versions 4.57 to 5.22 of transformers are tested.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import _blocks, _deferred, _mask, _native, _packed, _plain, _side, _torch, _window, _words
from ._sizes import holds

NAME = "evosdpa"

#: Arguments that models pass on and that say nothing beyond the mask: positions, lengths and places of packed sequences, what is
#: to be returned, and what other parts of a model are given.
_HARMLESS = frozenset(
    """
    image_grid_thw image_position_ids image_sizes input_features mm_token_type_ids pixel_values pixel_values_videos video_grid_thw
    block_table cache_position cu_seq_lens_k cu_seq_lens_q cu_seqlens deterministic input_ids labels logits_indices logits_processor_args
    logits_to_keep max_length_k max_length_q max_seqlen max_seqlen_k max_seqlen_q
    num_items_in_batch num_logits_to_keep output_hidden_states output_router_logits past_key_values position_embeddings
    position_ids read_index return_dict seq_idx sliding_window token_type_ids use_cache write_index
    """.split()
)
#: What a mask says by lengths.
_LENGTHS = frozenset(("seqused_k", "leftpad_k"))
_NO_SIDE: _side.Side = {}
#: What only a baseline takes is left to torch.
_FAST = True


def evosdpa_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, ``[batch, heads, sequence, head dimension]`` in, ``[batch, sequence, heads, …]`` out."""
    if not kwargs.keys() <= _HARMLESS:
        _refuse_unknown(kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if cache is not None or _packed.has_lengths(kwargs):
        if cache is not None and indices is not None:
            raise NotImplementedError(_words.argument("indices"))
        pattern = _packed.pattern_of(attention_mask, cache, causal, kwargs)
        alone = pattern is not None and position_bias is None and indices is None and query.shape[0] == 1
        if cache is not None:
            query, key, value = _torch.rows(query, key, value)
        if pattern is not None and alone and _torch.takes(query, key, value, dropout, scaling):
            return _packed.attention(module, query, key, value, cache, pattern, scaling, softcap, s_aux, kwargs), None
        if cache is not None:  # no mask says which tokens are whose, so that nothing else could compute it
            raise NotImplementedError(_words.paged(_torch.refusal_of(query, key, value, dropout)))
        attention_mask = _packed.written_out(attention_mask, pattern, query.shape[0], query.shape[2], key.shape[2], kwargs)
    if indices is not None:
        attention_mask = _picked(indices, attention_mask, query.shape[2], key.shape[2], causal)
    is_plain = position_bias is None and softcap is None and s_aux is None
    if not dropout and not _torch.compiling():
        changed = None if is_plain else (position_bias, softcap, s_aux)
        out = _straight(query, key, value, attention_mask, causal, scaling, changed, kwargs)
        if out is not None:
            return out, None
    # One query is the last one: it sees every key.
    causal = query.shape[2] > 1 and causal and attention_mask is None
    extras = {"softcap": softcap, "sinks": s_aux, "bias": position_bias}
    out = _computed(query, key, value, attention_mask, causal, dropout, scaling, extras)
    if out is not None:
        return out, None
    if isinstance(attention_mask, _deferred.DeferredMask):
        facts = attention_mask.facts
        if facts.is_nothing() or (is_plain and facts.is_causal_alone()):
            attention_mask, is_causal = None, not facts.is_nothing()  # torch is faster without
        else:
            attention_mask = attention_mask.dense()
    if attention_mask is not None and _blocks.is_block_mask(attention_mask):
        raise NotImplementedError(_words.block_mask())
    if is_plain:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return out, None
    dropout = dropout if module.training else 0.0
    bias = _together(position_bias, attention_mask)
    out = _plain.scored(query, key, value, scaling, causal, bias, softcap, s_aux, dropout)
    return out.transpose(1, 2).contiguous(), None


def _picked(indices: Tensor, mask: Tensor | None, queries: int, keys: int, causal: bool) -> Tensor:
    """The mask of a model that picks keys for each query (``[batch, queries, picked]``, below zero for none), as a dense one."""
    if not (isinstance(indices, Tensor) and indices.dim() == 3 and indices.shape[1] == queries) or indices.is_floating_point():
        raise NotImplementedError(_words.argument("indices"))
    places = torch.where(indices < 0, keys, indices).long()
    picked = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    picked = picked.scatter(-1, places, True)[:, None, :, :keys]
    if isinstance(mask, _deferred.DeferredMask):
        mask = mask.dense()
    if mask is None:
        return picked.tril(keys - queries) if causal else picked
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise NotImplementedError(_words.argument(name))


def _straight(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    changed: tuple[Tensor | None, float | None, Tensor | None] | None,
    named: dict[str, Any],
) -> Tensor | None:
    """What most calls of most models are, in few steps: each costs as much as a small kernel. ``changed`` is a position bias, a softcap and
    sinks. ``None`` for everything else."""
    if named.get("cu_seq_lens_q") is not None:
        return None
    bias, softcap, sinks = changed or (None, None, None)
    queries, chunk, dense, side = query.shape[2], 0, bias, _NO_SIDE
    # One query is the last one: it sees every key.
    window = _window.CAUSAL if causal and queries > 1 and mask is None else _window.FULL
    if mask is None:
        if window is _window.CAUSAL and key.shape[2] > queries:
            return None
    elif type(mask) is _deferred.DeferredMask:
        if (mask.facts.queries, mask.facts.keys) != (queries, key.shape[2]):
            return None
        plan = mask.facts.plan(bias is None)
        if plan is None:
            return None
        window, keys, side = plan
        if keys != mask.facts.keys:
            key, value = key[:, :, :keys], value[:, :, :keys]
            dense = None if dense is None else dense[..., :keys]
        if "mask" in side and dense is not None:
            return None
        dense, chunk = side.get("mask", dense), side.get("chunk", 0)
    elif dense is not None:
        return None
    else:
        dense = mask
    # Dense masks on a GPU are torch's.
    if dense is not None and query.is_cuda:
        return None
    if sinks is not None and (type(sinks) is not Tensor or sinks.dtype is not torch.float32):
        if not _torch.is_memory(sinks) or _torch.is_differentiated(sinks):
            return None
        sinks = sinks.detach().float()
    scores = None
    if dense is not None or softcap or chunk or sinks is not None:
        scores = (dense, softcap or 0.0, chunk, None, sinks)
    out: Tensor | None
    try:
        if side.keys().isdisjoint(_LENGTHS):
            out = _torch.straight(query, key, value, scaling, window, True, False, False, False, True, scores)
        else:
            by_token = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            lists = (None, None, None, None, side.get("seqused_k"), side.get("leftpad_k"), None, None, None)
            out = _native.straight_cache(
                by_token, None, None, lists, (None, None), (None, None), scaling, window, True, False, False, False, None, scores
            )
    except NotImplementedError:
        return None  # no kernel of this GPU takes it
    return out


def _computed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    extras: dict[str, Any],
) -> Tensor | None:
    """Attention by evosdpa; ``None`` if it does not take the call."""
    side: _side.Side = {name: extra for name, extra in extras.items() if extra is not None}
    window = _window.CAUSAL if causal else _window.FULL
    if isinstance(mask, _deferred.DeferredMask):
        facts = mask.facts
        plan = facts.plan("bias" not in side) if (facts.queries, facts.keys) == (query.shape[2], key.shape[2]) else None
        if plan is None:
            mask = mask.dense()
        else:
            window, keys, more = plan
            key, value = key[:, :, :keys], value[:, :, :keys]
            if "bias" in side:
                side["bias"] = side["bias"][..., :keys]
            side, mask = {**side, **more}, None
    if mask is not None and _blocks.is_block_mask(mask):
        side, mask = {**side, **_blocks.beside(mask, query, key)}, None
    if causal and key.shape[2] > query.shape[2]:
        # Behind the last query a static cache has nothing yet.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if "bias" in side:
            side["bias"] = side["bias"][..., : query.shape[2]]
    if mask is not None:
        if mask.dim() != 4 or not holds(mask.shape[3] == key.shape[2]):
            return None
        if mask.dtype == torch.bool and "bias" not in side:
            side["mask"] = mask
        else:
            # Beside a position bias torch's attention hides keys by a low bias, so that who sees none gets the mean of all.
            side["bias"] = _together(side.get("bias"), mask)
    query, key, value = _torch.autocast(query, key, value)
    if not _torch.is_differentiated(query, key, value):
        query, key, value = _torch.rows(query, key, value)  # what a convolution made lies column by column
    if not _torch.takes(query, key, value, dropout, scaling):
        return None
    if side and not _is_for(side, query):
        return None
    if side and torch.compiler.is_compiling() and not _is_for_operator(side, query, key):
        return None
    try:
        out, _ = _torch.attend(query, key, value, scaling, window, True, False, False, {**side, "fast": _FAST} if side else None)
    except NotImplementedError:
        return None
    return out.transpose(1, 2)


def _is_for(side: _side.Side, query: Tensor) -> bool:
    """Makes side inputs what a call takes; ``False`` if somebody wants their gradient, and for dense masks on a GPU: torch is faster
    with them, but has no block masks."""
    if query.is_cuda and ("mask" in side or "bias" in side) and "blocks" not in side:
        return False
    for name, given in side.items():
        if not isinstance(given, Tensor):
            continue
        if _torch.is_differentiated(given) or given.device != query.device:
            return False
        given = given.detach()
        if name == "sinks":
            given = given.float().contiguous()
        elif name == "bias" and given.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return False
        side[name] = given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()
    return True


def _is_for_operator(side: _side.Side, query: Tensor, key: Tensor) -> bool:
    """Makes dense masks and biases of a program that is compiled what the operator takes. ``False`` where one does not spread over the
    scores, and on a GPU, of which not all kernels take everything: what is refused when the program runs can go nowhere else."""
    if not query.is_cpu:
        return False
    for name, given in list(side.items()):
        if name in ("mask", "bias"):
            if _mask.objection(given, query, key) is not None:
                return False
            side |= _mask.beside(given, key.shape[2])
        elif name not in ("softcap", "sinks"):
            return False
    return True


def _together(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(torch.float32 if bias is None else bias.dtype).min
        return torch.where(mask, 0.0 if bias is None else bias, lowest)
    return mask if bias is None else bias if mask is None else bias + mask


def _choose(self: PreTrainedModel, requested_attention: str | None, *rest: Any, **named: Any) -> str:
    """transformers takes any name with "sdpa" in it for torch's function, which some models cannot use. Those that can use
    FlashAttention's or FlexAttention's say all they mean by arguments, and what is not known here is refused."""
    if requested_attention == NAME:
        _refuse_own_classes(self)
        _deferred.learn(self)
        if self._supports_flash_attn or self._supports_flex_attn:
            return NAME
        if not self._supports_sdpa:
            raise ValueError(_words.eager_alone(type(self).__name__))
    return _chosen(self, requested_attention, *rest, **named)  # type: ignore[no-any-return]


def _refuse_own_classes(model: PreTrainedModel) -> None:
    """Some layers (of Falcon, GPT-J, SAM) do not ask the registry, but are looked up as classes by the implementation's name."""
    module = type(model).__module__
    for table, classes in vars(sys.modules.get(module, sys)).items():
        if table.endswith("ATTENTION_CLASSES") and isinstance(classes, dict) and NAME not in classes:
            classes[NAME] = functools.partial(_refuse_class, _words.own_classes(f"{module}.{table}", list(classes)))


def _refuse_class(why: str, *given: Any, **named: Any) -> Any:
    raise NotImplementedError(why)


_chosen: Any = PreTrainedModel.get_correct_attn_implementation
setattr(PreTrainedModel, "get_correct_attn_implementation", _choose)
AttentionInterface.register(NAME, evosdpa_attention_forward)
AttentionMaskInterface.register(NAME, _deferred.mask)
_packed.join(NAME)
