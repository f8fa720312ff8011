"""Five lines: the same program with evosdpa in the place of torch's attention."""

import torch
import evosdpa

q, k, v = (torch.randn(1, 8, 512, 64) for _ in range(3))
out = evosdpa.sdpa(q, k, v, is_causal=True)  # was torch.nn.functional.scaled_dot_product_attention

theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"largest difference from torch: {(out - theirs).abs().max():.1e}")
