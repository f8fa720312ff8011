"""A solution for KernelBench: the same by evosdpa, which has to be installed where it is evaluated."""

import evosdpa
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return evosdpa.sdpa(q, k, v, is_causal=self.is_causal, enable_gqa=q.shape[1] != k.shape[1])
