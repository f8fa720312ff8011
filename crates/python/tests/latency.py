"""How long a small call takes from Python on a CPU: `tiny`, one head of 32 queries and keys, dimension 64, also packed; and one query of
two sequences over caches of 16 tokens, of which new ones are written.

usage: python latency.py OUT.json     (of a release build; fails where the fastest of a call of `sdpa` or `flash_attn_func` takes more than 8 µs)

The fastest is what is promised: a call is far shorter than a scheduler's slice, so that a busy machine leaves some of them alone.
"""

import json
import statistics
import sys
import time

import numpy
import torch

import evosdpa

CALLS, MOST_US = 20_000, 8.0


def measure(name, function, tensors):
    times_us = []
    for _ in range(CALLS):
        start = time.perf_counter_ns()
        function(*tensors)
        times_us.append((time.perf_counter_ns() - start) / 1e3)
    return {"call": name, "min_us": round(min(times_us), 2), "p50_us": round(statistics.median(times_us), 2), "samples": CALLS}


def served(library, dtype):
    """Packed sequences and caches of a library's tensors."""
    as_given = torch.from_numpy if library == "torch" else lambda array: array
    draw = lambda *shape: as_given(numpy.random.default_rng(0).standard_normal(shape).astype(dtype))  # noqa: E731
    ints = lambda *numbers: as_given(numpy.array(numbers, numpy.int32))  # noqa: E731
    q, k, v, cu = *(draw(32, 1, 64) for _ in range(3)), ints(0, 32)
    yield "evosdpa.flash_attn_varlen_func", lambda: evosdpa.flash_attn_varlen_func(q, k, v, cu, cu, 32, 32)
    query, caches, new, held = draw(2, 1, 1, 64), (draw(2, 16, 1, 64), draw(2, 16, 1, 64)), draw(2, 1, 1, 64), ints(5, 9)
    yield "evosdpa.flash_attn_with_kvcache", lambda: evosdpa.flash_attn_with_kvcache(query, *caches, cache_seqlens=held)
    yield "evosdpa.flash_attn_with_kvcache with a number", lambda: evosdpa.flash_attn_with_kvcache(query, *caches, cache_seqlens=7)
    yield "evosdpa.flash_attn_with_kvcache with new tokens", lambda: evosdpa.flash_attn_with_kvcache(query, *caches, new, new, cache_seqlens=held)


def main():
    tensors = {str(dtype).removeprefix("torch."): [torch.randn(1, 1, 32, 64).to(dtype)] * 3 for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    arrays = {dtype: [numpy.random.default_rng(0).standard_normal((1, 1, 32, 64)).astype(dtype)] * 3 for dtype in ("float32", "float16")}
    ours = [measure(f"evosdpa.sdpa, torch {dtype}", evosdpa.sdpa, three) for dtype, three in tensors.items()]
    causal = torch.ones(32, 32, dtype=torch.bool).tril()
    masked, capped = lambda *three: evosdpa.sdpa(*three, causal), lambda *three: evosdpa.flash_attn_func(*three, softcap=30.0)
    ours += [measure("evosdpa.sdpa with a mask, torch float32", masked, tensors["float32"])]
    ours += [measure("evosdpa.flash_attn_func with a softcap, torch float32", capped, [x.transpose(1, 2) for x in tensors["float32"]])]
    ours += [measure(f"evosdpa.sdpa, NumPy {dtype}", evosdpa.sdpa, three) for dtype, three in arrays.items()]
    packed = [
        measure(f"{name}, {library} {dtype}", call, ())
        for library in ("torch", "NumPy")
        for dtype in ("float32", "float16")
        for name, call in served(library, dtype)
    ]
    peer = torch.nn.functional.scaled_dot_product_attention
    theirs = [measure(f"torch's, {dtype}", peer, three) for dtype, three in tensors.items()]
    theirs += [measure("torch's with a mask, float32", lambda *three: peer(*three, attn_mask=causal), tensors["float32"])]
    with open("/proc/cpuinfo") as facts:
        cpu = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown")
    environment = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "evosdpa": evosdpa.__version__}
    with open(sys.argv[1], "w") as file:
        json.dump({"schema": "evosdpa.cpu-latency/1", "environment": environment, "rows": ours + packed + theirs}, file, indent=1)
        file.write("\n")
    slow = [row for row in ours if row["min_us"] > MOST_US]
    sys.exit(f"more than {MOST_US} µs: {slow}" if slow else 0)


if __name__ == "__main__":
    main()
