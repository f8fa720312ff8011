"""What each modifier of scores costs on a CPU, beside the plain problem of the same sizes.

usage: python modifiers_cost.py SECONDS OUT.json     (so many seconds for each type, calls in turn; the machine must be idle)
"""

import json
import statistics
import sys
import time

import torch

import evosdpa
from evosdpa import _torch, _window

BATCH, HEADS, LENGTH, DIM = 1, 8, 1024, 64


def modifiers(dtype):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    one, each = (1, 1, LENGTH, LENGTH), (1, HEADS, LENGTH, LENGTH)
    return {
        "plain": None,
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.rand(HEADS, generator=generator)},
        "sinks": {"sinks": normal(HEADS)},
        "bias, one for all": {"bias": normal(*one).to(dtype)},
        "bias, each head": {"bias": normal(*each).to(dtype)},
        "mask, one for all": {"mask": normal(*one) > 0},
        "mask, each head": {"mask": normal(*each) > 0},
        "key padding": {"seqused_k": torch.tensor([LENGTH], dtype=torch.int32)},
    }


def measure(dtype, seconds):
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM).to(dtype) for _ in range(3))
    sides = modifiers(dtype)
    samples = {name: [] for name in sides}
    until = None
    while until is None or time.monotonic() < until:
        for name, side in sides.items():
            start = time.perf_counter()
            _torch.compute(q, k, v, None, _window.FULL, False, False, False, side)
            if until is not None:  # the first round warms up
                samples[name].append((time.perf_counter() - start) * 1e6)
        until = until or time.monotonic() + seconds
    plain = statistics.median(samples["plain"])
    for name, times_us in samples.items():
        p50_us = statistics.median(times_us)
        problem = f"b{BATCH}h{HEADS}s{LENGTH}d{DIM} {str(dtype).removeprefix('torch.')}"
        row = {"problem": problem, "modifier": name, "p50_us": round(p50_us, 1), "min_us": round(min(times_us), 1)}
        yield {**row, "samples": len(times_us), "over_plain": round(p50_us / plain - 1, 4)}


def main():
    seconds, out = float(sys.argv[1]), sys.argv[2]
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measure(dtype, seconds)]
    with open("/proc/cpuinfo") as facts:
        cpu = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown")
    environment = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "evosdpa": evosdpa.__version__}
    with open(out, "w") as file:
        json.dump({"schema": "evosdpa.cpu-modifiers/1", "environment": environment, "rows": rows}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
