"""Times PyTorch's scaled_dot_product_attention for evosdpa.

Speaks JSON lines: one request on standard input, one answer on standard output.
"""

import json
import os
import sys
import time

# Libraries may print what they like; answers go through a descriptor of our own.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def read_tensor(torch, description):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[description["dtype"]]
    with open(description["path"], "rb") as file:
        flat = torch.frombuffer(bytearray(file.read()), dtype=dtype)
    return torch.as_strided(flat, description["shape"], description["strides"])


def band_mask(torch, seq_q, seq_kv, lo, hi):
    distance = torch.arange(seq_kv)[None, :] - torch.arange(seq_q)[:, None]
    return (distance >= lo) & (distance <= hi)


class Session:
    def __init__(self, torch):
        self.torch = torch
        self.sets = []
        self.options = {}
        self.output = None

    def load(self, request):
        self.sets = [[read_tensor(self.torch, t) for t in tensors] for tensors in request["sets"]]
        query, key, _ = self.sets[0]
        self.options = {"scale": request["scale"]}
        if query.shape[1] != key.shape[1]:
            self.options["enable_gqa"] = True
        if request["mask"] == "causal":
            self.options["is_causal"] = True
        elif request["mask"] == "band":
            mask = band_mask(self.torch, query.shape[2], key.shape[2], request["lo"], request["hi"])
            self.options["attn_mask"] = mask
        return {}

    def time(self, request):
        query, key, value = self.sets[request["set"]]
        attention = self.torch.nn.functional.scaled_dot_product_attention
        start = time.perf_counter_ns()
        self.output = attention(query, key, value, **self.options)
        return {"time_us": (time.perf_counter_ns() - start) / 1e3}

    def save(self, request):
        flat = self.output.contiguous().view(self.torch.uint8).flatten()
        with open(request["path"], "wb") as file:
            file.write(bytes(flat.untyped_storage()))
        return {}


def main():
    try:
        import torch
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is the answer
        answer(error=f"torch not importable: {problem}")
        return
    torch.set_grad_enabled(False)
    session = Session(torch)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "hello":
                torch.set_num_threads(request["threads"])
                answer(version=torch.__version__, threads=torch.get_num_threads())
            else:
                answer(**getattr(session, request["op"])(request))
        except Exception as problem:  # noqa: BLE001
            answer(error=f"{type(problem).__name__}: {problem}")


main()
