"""Times PyTorch's scaled_dot_product_attention for evosdpa.

Speaks JSON lines: one request on standard input, one answer on standard output.
"""

import contextlib
import ctypes
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
    """One problem at a time, on one device, by any of PyTorch's backends."""

    # One sample on a GPU is the mean of calls for about this long, and of no more than so many: as of kernels (timed.rs).
    SAMPLE_US = 300
    SAMPLE_CALLS_MAX = 80

    def __init__(self, torch):
        self.torch = torch
        self.device = "cpu"
        self.sets = []
        self.options = {}
        self.graphs = {}
        self.eager_calls = None
        self.output = None

    def load(self, request):
        self.device = request["device"]
        self.graphs = {}
        self.eager_calls = None
        self.sets = [[read_tensor(self.torch, t).to(self.device) for t in tensors] for tensors in request["sets"]]
        query, key, _ = self.sets[0]
        self.options = {"scale": request["scale"]}
        if query.shape[1] != key.shape[1]:
            self.options["enable_gqa"] = True
        if request["mask"] == "causal":
            self.options["is_causal"] = True
        elif request["mask"] == "band":
            mask = band_mask(self.torch, query.shape[2], key.shape[2], request["lo"], request["hi"])
            self.options["attn_mask"] = mask.to(self.device)
        return {}

    def call(self, number):
        query, key, value = self.sets[number % len(self.sets)]
        attention = self.torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, **self.options)

    def backend(self, name):
        if name == "default":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
        }
        return sdpa_kernel(backends[name])

    def time(self, request):
        with self.backend(request["backend"]):
            if self.device == "cpu":
                start = time.perf_counter_ns()
                self.output = self.call(request["set"])
                return {"time_us": (time.perf_counter_ns() - start) / 1e3}
            if request["graph"]:
                return {"time_us": self.time_graph(request["backend"])}
            return {"time_us": self.time_eager()}

    def calls_of_a_sample(self, call_us):
        """Whole turns through the input sets, so that every set is used equally often."""
        wanted = min(max(int(self.SAMPLE_US / call_us), 1), self.SAMPLE_CALLS_MAX)
        return -(-wanted // len(self.sets)) * len(self.sets)

    def time_eager(self):
        """What a program that calls PyTorch in a loop sees: host and device together."""

        def time_calls(calls):
            self.torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for number in range(calls):
                self.output = self.call(number)
            self.torch.cuda.synchronize()
            return (time.perf_counter_ns() - start) / 1e3 / calls

        if self.eager_calls is None:
            time_calls(1)
            self.eager_calls = self.calls_of_a_sample(time_calls(len(self.sets)))
        return time_calls(self.eager_calls)

    def time_graph(self, backend):
        """The device alone: calls captured in a CUDA graph over all input sets."""
        if backend not in self.graphs:
            self.call(0)
            few = self.capture(len(self.sets))
            self.replay(few)
            self.graphs[backend] = self.capture(self.calls_of_a_sample(self.replay(few)))
        return self.replay(self.graphs[backend])

    def capture(self, calls):
        """A graph of so many calls, with an output to keep."""
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            outputs = [self.call(number) for number in range(calls)]
        return graph, calls, outputs[-1]

    def replay(self, captured):
        """The share of one call."""
        graph, calls, _ = captured
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    def save(self, request):
        with self.backend(request["backend"]):
            output = self.call(0)
        packed = output.contiguous().cpu()
        with open(request["path"], "wb") as file:
            file.write(ctypes.string_at(packed.data_ptr(), packed.numel() * packed.element_size()))
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
                answer(version=torch.__version__, threads=torch.get_num_threads(), cuda=torch.cuda.is_available())
            else:
                answer(**getattr(session, request["op"])(request))
        except Exception as problem:  # noqa: BLE001
            answer(error=f"{type(problem).__name__}: {problem}")


main()
