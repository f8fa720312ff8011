"""A KernelBench answer: two matrix products and a softmax, as anyone would write them first.

    evosdpa import kernelbench examples/submissions/matmuls.py --shape b1h8s512d64:causal
"""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q, k, v):
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v.float()).to(q.dtype)
