"""Calls a submission for evosdpa: KernelBench's ModelNew or GPU MODE's custom_kernel.

Runs behind ``requests.py``.
"""

import ctypes
import importlib.util
import inspect
import os
import sys
import time

# Taken before anything of the submission runs. What it does to the clock later is seen by the one outside.
now = time.perf_counter_ns


class Session:
    def __init__(self, torch):
        self.torch = torch
        self.function = None
        self.device = "cpu"
        self.flat = []
        self.sets = []
        self.output = None

    def open(self, request):
        path = os.path.abspath(request["path"])
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("submission", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["submission"] = module
        spec.loader.exec_module(module)
        if request["entry"] == "ModelNew":
            wanted = inspect.signature(module.ModelNew).parameters
            model = module.ModelNew(*([request["is_causal"]] if wanted else []))
            self.function = model.to(request["device"]) if isinstance(model, self.torch.nn.Module) else model
        else:
            self.function = lambda q, k, v: module.custom_kernel((q, k, v))
        self.device = request["device"]
        return {}

    def read(self, description):
        dtype = {"f32": self.torch.float32, "f16": self.torch.float16, "bf16": self.torch.bfloat16}[description["dtype"]]
        with open(description["path"], "rb") as file:
            return self.torch.frombuffer(bytearray(file.read()), dtype=dtype).to(self.device)

    def load(self, request):
        self.flat = [[self.read(t) for t in tensors] for tensors in request["sets"]]
        pairs = zip(self.flat, request["sets"], strict=True)
        self.sets = [
            [self.torch.as_strided(flat, t["shape"], t["strides"]) for flat, t in zip(flats, tensors, strict=True)]
            for flats, tensors in pairs
        ]
        self.output = None
        return {}

    def refill(self, request):
        """Other numbers at the same addresses."""
        for flat, description in zip(self.flat[request["set"]], request["tensors"], strict=True):
            flat.copy_(self.read(description))
        return {}

    def finish(self):
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def call(self, request):
        self.finish()
        start = now()
        self.output = self.function(*self.sets[request["set"]])
        self.finish()
        return {"time_us": (now() - start) / 1e3}

    def repeat(self, request):
        for number in range(request["calls"]):
            self.output = self.function(*self.sets[number % len(self.sets)])
            self.finish()
        return {}

    def poison(self, request):
        if isinstance(self.output, self.torch.Tensor):
            self.output.fill_(float("nan"))
        return {}

    def write(self, path, tensor):
        packed = tensor.detach().contiguous().cpu()
        with open(path, "wb") as file:
            file.write(ctypes.string_at(packed.data_ptr(), packed.numel() * packed.element_size()))

    def save(self, request):
        output = self.output
        if not isinstance(output, self.torch.Tensor):
            raise TypeError(f"it returned {type(output).__name__}, not a tensor")
        shape, dtype = tuple(request["shape"]), self.sets[0][0].dtype
        if tuple(output.shape) != shape or output.dtype != dtype:
            raise ValueError(f"it returned {tuple(output.shape)} of {output.dtype}, not {shape} of {dtype}")
        self.write(request["path"], output)
        return {}

    def inputs(self, request):
        for flat, path in zip(self.flat[request["set"]], request["paths"], strict=True):
            self.write(path, flat)
        return {}


serve(Session)
