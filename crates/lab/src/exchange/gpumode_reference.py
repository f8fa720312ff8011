import torch
import torch.nn.functional as F
from task import input_t, output_t
from utils import make_match_reference

IS_CAUSAL = @IS_CAUSAL@
DTYPE = torch.@TORCH_DTYPE@
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(batch: int, heads: int, heads_kv: int, queries: int, keys: int, dim: int, value_dim: int, seed: int) -> input_t:
    generator = torch.Generator(device=DEVICE)
    generator.manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator, dtype=torch.float32).to(DTYPE)

    return draw(batch, heads, queries, dim), draw(batch, heads_kv, keys, dim), draw(batch, heads_kv, keys, value_dim)


def ref_kernel(data: input_t) -> output_t:
    q, k, v = data
    wide = (tensor.float() for tensor in (q, k, v))
    return F.scaled_dot_product_attention(*wide, is_causal=IS_CAUSAL, enable_gqa=q.shape[1] != k.shape[1]).to(q.dtype)


check_implementation = make_match_reference(ref_kernel, rtol=@TOLERANCE@, atol=@TOLERANCE@)
