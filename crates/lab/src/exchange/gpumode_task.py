from typing import Tuple, TypedDict, TypeVar

import torch

input_t = TypeVar("input_t", bound=Tuple[torch.Tensor, torch.Tensor, torch.Tensor])
output_t = TypeVar("output_t", bound=torch.Tensor)


class TestSpec(TypedDict):
    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    seed: int
