"""The program that times baselines, with stand-ins for libraries that need a GPU.

A stand-in has its library's layout, signature and meaning of masks, and computes by the definition.
"""

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).parents[2] / "src" / "baseline" / "torch_baseline.py"

FLASH = """
import torch
from by_definition import attention

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    left, right = (-1, 0) if causal else window_size
    out = attention(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, left, right)
    return RESULT
"""

FLASHINFER = """
import torch
from by_definition import attention

class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype == torch.uint8
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, causal=False, sm_scale=None, q_data_type=None):
        self.indptr, self.causal, self.scale = (qo_indptr.tolist(), kv_indptr.tolist()), causal, sm_scale
    def run(self, q, k, v):
        outputs = []
        for i in range(len(self.indptr[0]) - 1):
            rows, keys = (slice(indptr[i], indptr[i + 1]) for indptr in self.indptr)
            one = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])]
            outputs.append(attention(*one, self.scale, -1, 0 if self.causal else -1)[0].transpose(0, 1))
        return torch.cat(outputs)
"""

XFORMERS = """
import types
from by_definition import attention

class LowerTriangularFromBottomRightMask: pass

fmha = types.SimpleNamespace(
    attn_bias=types.SimpleNamespace(LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask))

def memory_efficient_attention(query, key, value, attn_bias=None, scale=None):
    shape = query.shape[:-1] + value.shape[-1:]
    flat = [x.reshape(*x.shape[:2], -1, x.shape[-1]).transpose(1, 2) for x in (query, key, value)]
    return attention(*flat, scale, -1, -1 if attn_bias is None else 0).transpose(1, 2).reshape(shape)
"""

DEFINITION = """
import torch

def attention(q, k, v, scale, left, right):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    past = k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None] - past
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0: hidden |= distance < -left
    if right >= 0: hidden |= distance > right
    return ((q @ k.mT) * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v
"""


class Child:
    def __init__(self, path):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(path), "PATH": "/usr/bin"},
        )

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "by_definition.py").write_text(DEFINITION)
    (folder / "flash_attn_interface.py").write_text(FLASH.replace("RESULT", "out.transpose(1, 2), None"))
    (folder / "flash_attn.py").write_text(FLASH.replace("RESULT", "out.transpose(1, 2)"))
    (folder / "flashinfer.py").write_text(FLASHINFER)
    (folder / "xformers").mkdir()
    (folder / "xformers" / "__init__.py").write_text("")
    (folder / "xformers" / "ops.py").write_text(XFORMERS)
    return folder


@pytest.fixture(scope="module")
def child(folder):
    child = Child(folder)
    assert "version" in child.ask(op="hello", threads=1)
    yield child
    child.process.kill()


LIBRARIES = ["flash-attn-3", "flash-attn-2", "flashinfer", "xformers"]
UNBOUNDED = 1 << 30


def load(child, folder, shape, lo, hi):
    batch, heads, kv_heads, seq_q, seq_kv, dim = shape
    generator = torch.Generator().manual_seed(7)
    descriptions = []
    tensors = []
    for name, size in [("q", (batch, heads, seq_q, dim)), ("k", (batch, kv_heads, seq_kv, dim)), ("v", (batch, kv_heads, seq_kv, dim))]:
        tensor = torch.randn(size, generator=generator)
        tensors.append(tensor)
        path = folder / name
        path.write_bytes(tensor.numpy().tobytes())
        descriptions.append({"path": str(path), "dtype": "f32", "shape": size, "strides": tensor.stride()})
    mask = "full" if (lo, hi) == (-UNBOUNDED, UNBOUNDED) else "band"
    answer = child.ask(op="load", device="cpu", sets=[descriptions], scale=0.3, mask=mask, lo=lo, hi=hi)
    assert answer == {}
    return tensors


def output(child, folder, backend, shape):
    batch, heads, _, seq_q, _, dim = shape
    assert child.ask(op="find", backend=backend) == {}
    answer = child.ask(op="save", backend=backend, path=str(folder / "o"))
    if "error" in answer:
        return answer["error"]
    flat = torch.frombuffer(bytearray((folder / "o").read_bytes()), dtype=torch.float32)
    return flat.reshape(batch, heads, seq_q, dim)


def expected(tensors, lo, hi):
    query, key, value = tensors
    distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
    mask = (distance >= lo) & (distance <= hi)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("shape", [(2, 4, 4, 5, 5, 8), (2, 4, 2, 3, 7, 8), (1, 6, 1, 1, 9, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_each_library_is_asked_the_same_question(child, folder, backend, shape, causal):
    past = shape[4] - shape[3]
    lo, hi = -UNBOUNDED, past if causal else UNBOUNDED
    tensors = load(child, folder, shape, lo, hi)
    torch.testing.assert_close(output(child, folder, backend, shape), expected(tensors, lo, hi), rtol=1e-5, atol=1e-5)
    timed = child.ask(op="time", backend=backend, set=0, graph=True, between=False)
    assert timed["time_us"] > 0


def test_windows_count_from_the_last_query_and_key(child, folder):
    shape = (1, 2, 2, 5, 9, 8)
    tensors = load(child, folder, shape, 4 - 3, 4)
    answer = output(child, folder, "flash-attn-3", shape)
    torch.testing.assert_close(answer, expected(tensors, 1, 4), rtol=1e-5, atol=1e-5)
    for backend in ["flashinfer", "xformers"]:
        assert "only full and causal" in output(child, folder, backend, shape)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_mask_that_a_library_counts_otherwise_is_not_asked_of_it(child, folder, backend):
    # Query 0 sees key 0 alone, among more keys than queries: top-left.
    shape = (1, 2, 2, 3, 7, 8)
    load(child, folder, shape, -UNBOUNDED, 0)
    assert "NotImplementedError" in output(child, folder, backend, shape)


def test_what_is_not_installed_says_so(tmp_path):
    (tmp_path / "flash_attn.py").write_text("import a_module_that_is_missing")
    child = Child(tmp_path)
    child.ask(op="hello", threads=1)
    absent = child.ask(op="find", backend="flash-attn-3")["error"]
    assert absent.startswith("flash_attn_interface or flash_attn_3.flash_attn_interface is not installed in")
    broken = child.ask(op="find", backend="flash-attn-2")["error"]
    assert broken == "flash_attn cannot be imported: No module named 'a_module_that_is_missing'"
    assert child.ask(op="find", backend="cudnn") == {}
    child.process.kill()
