"""A small transformer, timed with torch's attention and with evosdpa's, in turns.

usage: python transformer.py [--device cpu|cuda] [--length 512] [--rounds 20]
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import evosdpa


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()

    torch.manual_seed(0)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    model = torch.nn.Sequential(*(Block(512, 8) for _ in range(4))).to(given.device, dtype).eval()
    x = torch.randn(1, given.length, 512, device=given.device, dtype=dtype)

    def once() -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        out = model(x)
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, out

    with torch.inference_mode():
        times: dict[str, list[float]] = {"torch": [], "evosdpa": []}
        for round in range(given.rounds + 2):
            theirs_s, theirs = once()
            with evosdpa.patch():
                ours_s, ours = once()
            if round >= 2:  # the first two warm up
                times["torch"].append(theirs_s)
                times["evosdpa"].append(ours_s)
    for name, samples in times.items():
        print(f"{name:8} {statistics.median(samples) * 1e3:8.2f} ms a pass (median of {len(samples)})")
    print(f"largest difference of the outputs: {(ours - theirs).abs().max():.1e}")


if __name__ == "__main__":
    main()
