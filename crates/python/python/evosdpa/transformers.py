"""evosdpa in transformers' attention registry.

Importing this module is all there is to do::

    import evosdpa.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="evosdpa")

Packed inputs (``cu_seq_lens_q`` and the like, as for flash attention) and continuous batching (``generate_batch``) need no
masks. What evosdpa does not compute (padding and other dense masks, dropout, gradients) is computed by ``sdpa`` as before.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import _api, _packed, _torch

NAME = "evosdpa"

# Arguments that change the result and that only transformers' own function knows.
_LEFT_TO_SDPA = ("softcap", "position_bias", "cache", "s_aux")


def evosdpa_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, ``[batch, heads, sequence, head dimension]`` in, ``[batch, sequence, heads, …]`` out."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    cache = kwargs.get("cache")
    if _packed.is_packed(query, attention_mask, cache, kwargs) and _torch.takes(query, key, value, dropout, scaling):
        extras = kwargs.get("softcap"), kwargs.get("s_aux")
        return _packed.attention(module, query, key, value, cache, causal, scaling, *extras, kwargs), None
    if (
        attention_mask is not None
        or any(kwargs.get(name) is not None for name in _LEFT_TO_SDPA)
        or not _torch.takes(query, key, value, dropout, scaling)
    ):
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return out, None
    # One query is the last one: it sees every key.
    causal = bool(query.shape[2] > 1 and causal)
    out = _api.sdpa(query, key, value, None, 0.0, causal, scaling, True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, evosdpa_attention_forward)
# The masks that sdpa gets: none where is_causal says the same.
AttentionMaskInterface.register(NAME, sdpa_mask)
_packed.join(NAME)
