"""What a call costs beyond the work: the host's time for one query and one key, where there is nearly no work.

usage: python overhead.py [--device cpu|cuda] [--json]

`call` is the whole of evosdpa.sdpa; `native` is the native function inside it with its arguments ready. What is left between
the two is Python's share; torch's own function is beside them.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import evosdpa
from evosdpa import _torch


def per_call_us(work, calls: int, rounds: int = 60) -> float:
    """The tenth part of the rounds that were fastest: other programs only ever add time. With a GPU the queue is emptied
    between rounds, outside the clock."""
    samples = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.quantiles(samples, n=10)[0]


def native_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The native function with everything ready that Python would have to find out."""
    meaning = (None, (-1, -1, False), False, False, False, False)
    return lambda: _torch.straight(q, k, v, *meaning)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # Queues of a GPU are short: more calls than fit would measure the kernels.
    calls = 200
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, 1, 64, device=given.device, dtype=dtype) for _ in range(3))
    flash = [x.transpose(1, 2) for x in (q, k, v)]
    native = native_call(q, k, v)
    with torch.inference_mode():
        evosdpa.sdpa(q, k, v)
        found = {
            "call_us": per_call_us(lambda: evosdpa.sdpa(q, k, v), calls),
            "flash_call_us": per_call_us(lambda: evosdpa.flash_attn_func(*flash), calls),
            "operator_us": per_call_us(
                lambda: torch.ops.evosdpa.forward(q, k, v, None, -1, -1, False, False, False), calls
            ),
            "native_us": per_call_us(native, calls),
            "torch_us": per_call_us(lambda: F.scaled_dot_product_attention(q, k, v), calls),
        }
    found["overhead_us"] = found["call_us"] - found["native_us"]
    if given.json:
        print(json.dumps({"device": given.device, **found}))
    else:
        for name, us in found.items():
            print(f"{name.removesuffix('_us'):12} {us:7.2f} µs")


if __name__ == "__main__":
    main()
