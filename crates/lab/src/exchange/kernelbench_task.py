"""@PROBLEM@ as a task of KernelBench: a Model, and the inputs it is called with."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, HEADS, HEADS_KV = @BATCH@, @HEADS@, @HEADS_KV@
QUERIES, KEYS, DIM, VALUE_DIM = @QUERIES@, @KEYS@, @DIM@, @VALUE_DIM@
DTYPE = torch.@TORCH_DTYPE@


class Model(nn.Module):
    """Scaled-dot-product attention@MASK_WORDS@."""

    def __init__(self, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=HEADS != HEADS_KV)


def get_inputs():
    q = torch.randn(BATCH, HEADS, QUERIES, DIM, dtype=DTYPE)
    k = torch.randn(BATCH, HEADS_KV, KEYS, DIM, dtype=DTYPE)
    v = torch.randn(BATCH, HEADS_KV, KEYS, VALUE_DIM, dtype=DTYPE)
    return [q, k, v]


def get_init_inputs():
    return [@IS_CAUSAL@]
