"""The program that times baselines, with stand-ins for libraries that need a GPU.

A stand-in has its library's layout, signature and meaning of masks, and computes by the definition.
"""

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).parents[2] / "src" / "baseline"
PROGRAM = (FOLDER / "requests.py").read_text() + "\n\n" + (FOLDER / "torch_baseline.py").read_text()

FLASH = """
import torch
from by_definition import attention

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    left, right = (-1, 0) if causal else window_size
    out = attention(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, left, right)
    return RESULT
"""

PACKED = """
import torch
from by_definition import attention

def sequences(q, cu_q, keys_of, lengths, scale, causal, window):
    left, right = (-1, 0) if causal else window
    out = torch.zeros_like(q)
    for b, count in enumerate(lengths):
        rows = slice(cu_q[b], cu_q[b + 1])
        one = [x.transpose(0, 1)[None] for x in (q[rows], *(x[:count] for x in keys_of(b)))]
        if one[0].shape[2]:
            out[rows] = attention(*one, scale, left, right)[0].transpose(0, 1)
    return out

def of_packed(k, v, cu):
    return lambda b: [x[cu[b] : cu[b + 1]] for x in (k, v)]

def of_cache(k, v, table):
    return lambda b: [x[b] if table is None else x[table[b].long()].flatten(0, 1) for x in (k, v)]
"""

# The words of FlashAttention 3's own package.
PACKED_OWN = """
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=None, softmax_scale=None,
                           causal=False, window_size=(-1, -1)):
    from packed import of_packed, sequences
    cu, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths = [b - a for a, b in zip(cu_k, cu_k[1:])] if seqused_k is None else seqused_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in zip(cu, cu[1:])) and max_seqlen_k == max(lengths)
    return sequences(q, cu, of_packed(k, v, cu_k), lengths, softmax_scale, causal, window_size), None

def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, cu_seqlens_q, max_seqlen_q, page_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1)):
    from packed import of_cache, sequences
    keys_of = of_cache(k_cache, v_cache, page_table)
    return sequences(q, cu_seqlens_q.tolist(), keys_of, cache_seqlens.tolist(), softmax_scale, causal, window_size)
"""

# And of vLLM's.
PACKED_VLLM = """
def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None,
                           causal=False, window_size=None, block_table=None, fa_version=2):
    from packed import of_cache, of_packed, sequences
    assert fa_version == 3 and (cu_seqlens_k is None or block_table is None)
    packed = cu_seqlens_k is not None
    keys_of = of_packed(k, v, cu_seqlens_k.tolist()) if packed else of_cache(k, v, block_table)
    lengths = cu_seqlens_k.diff().tolist() if seqused_k is None else seqused_k.tolist()
    return sequences(q, cu_seqlens_q.tolist(), keys_of, lengths, softmax_scale, causal, window_size or [-1, -1])
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

ONNX = """
import json, types

class TensorProto:
    FLOAT, FLOAT16 = 1, 10

class Model:
    def __init__(self, text): self.text = text
    def SerializeToString(self): return self.text

helper = types.SimpleNamespace(
    make_tensor_value_info=lambda name, dtype, shape: name,
    make_node=lambda kind, inputs, outputs, **attributes: (kind, inputs, outputs, attributes),
    make_graph=lambda nodes, name, inputs, outputs: nodes[0],
    make_opsetid=lambda domain, version: (domain, version),
    make_model=lambda graph, opset_imports, ir_version: Model(json.dumps([graph, opset_imports]).encode()))
"""

ONNXRUNTIME = """
import json, torch
from by_definition import attention

class SessionOptions:
    def add_session_config_entry(self, key, value):
        assert (key, value) == ("session.intra_op.allow_spinning", "0")

class InferenceSession:
    def __init__(self, model, options, providers):
        (kind, inputs, outputs, self.attributes), opsets = json.loads(model)
        assert (kind, inputs, outputs, opsets) == ("Attention", ["q", "k", "v"], ["o"], [["", 23]])
        assert options.intra_op_num_threads == 1 and providers == ["CPUExecutionProvider"]
    def run(self, names, tensors):
        query, key, value = (torch.from_numpy(tensors[name]) for name in "qkv")
        right = 0 if self.attributes["is_causal"] else -1
        return [attention(query, key, value, self.attributes["scale"], -1, right).numpy()]
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
            [sys.executable, "-c", PROGRAM],
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
    (folder / "packed.py").write_text(PACKED)
    (folder / "flash_attn_interface.py").write_text(FLASH.replace("RESULT", "out.transpose(1, 2), None") + PACKED_OWN)
    (folder / "flash_attn.py").write_text(FLASH.replace("RESULT", "out.transpose(1, 2)"))
    (folder / "flashinfer.py").write_text(FLASHINFER)
    (folder / "onnx.py").write_text(ONNX)
    (folder / "onnxruntime.py").write_text(ONNXRUNTIME)
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


@pytest.mark.parametrize("shape, causal", [((2, 4, 2, 5, 5, 8), False), ((2, 4, 2, 5, 5, 8), True), ((1, 6, 1, 1, 9, 16), False)])
def test_onnxruntime_is_asked_the_same_question_where_it_counts_alike(child, folder, shape, causal):
    lo, hi = -UNBOUNDED, 0 if causal else UNBOUNDED
    tensors = load(child, folder, shape, lo, hi)
    answer = output(child, folder, "onnxruntime", shape)
    torch.testing.assert_close(answer, expected(tensors, lo, hi), rtol=1e-5, atol=1e-5)
    assert child.ask(op="time", backend="onnxruntime", set=0, graph=False, between=False)["time_us"] > 0


def test_onnxruntime_is_not_asked_for_masks_that_it_counts_otherwise(child, folder):
    shape = (1, 2, 2, 3, 7, 8)
    for lo, hi in [(-UNBOUNDED, 4), (-UNBOUNDED, 0), (-1, 1)]:
        load(child, folder, shape, lo, hi)
        assert "NotImplementedError" in output(child, folder, "onnxruntime", shape)


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


# Lengths of queries and keys, what else there is, and whether the mask is causal.
SERVED = {
    "packed": ([3, 0, 5, 2], [3, 0, 5, 2], {}),
    "packed, other keys": ([3, 1, 5, 2], [4, 6, 5, 9], {}),
    "filled": ([2, 2, 2], [5, 9, 4], {"seqused_kv": [5, 9, 4]}),
    "paged": ([2, 2, 2], [5, 9, 4], {"seqused_kv": [5, 9, 4], "page": 4}),
    "paged, packed queries": ([3, 1, 4], [5, 9, 4], {"seqused_kv": [5, 9, 4], "page": 4, "cu_seqlens_q": [0, 3, 4, 8]}),
}


def served(folder, case, heads, kv_heads, causal):
    """A request, its shape, and the right output."""
    queries, keys, given = SERVED[case]
    batch, dim = len(queries), 8
    generator = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    starts = lambda lengths: [sum(lengths[:i]) for i in range(batch + 1)]  # noqa: E731
    names = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "leftpad_kv", "cache_batch_idx", "page_table")
    side = dict.fromkeys(names) | {"batch": batch, "seq_kv": 12, "lo": -UNBOUNDED, "hi": 0 if causal else UNBOUNDED, "bottom_right": True}
    rooms = starts(queries) if case.startswith("packed") else given.get("cu_seqlens_q")
    q = draw(1, heads, rooms[-1] + 2, dim) if rooms else draw(batch, heads, 2, dim)
    side["cu_seqlens_q"] = rooms
    if case.startswith("packed"):
        side["cu_seqlens_kv"] = starts(keys)
        k, v = draw(1, kv_heads, sum(keys) + 1, dim), draw(1, kv_heads, sum(keys) + 1, dim)
        of = lambda x, b: x[0, :, sum(keys[:b]) : sum(keys[: b + 1])]  # noqa: E731
    elif "page" in given:
        table = torch.randperm(9, generator=generator).view(3, 3)
        side |= {"page_table": table.tolist(), "seqused_kv": keys}
        k, v = draw(9, kv_heads, 4, dim), draw(9, kv_heads, 4, dim)
        of = lambda x, b: x[table[b]].transpose(0, 1).flatten(1, 2)[:, : keys[b]]  # noqa: E731
    else:
        side["seqused_kv"] = keys
        k, v = draw(batch, kv_heads, 12, dim), draw(batch, kv_heads, 12, dim)
        of = lambda x, b: x[b, :, : keys[b]]  # noqa: E731
    wanted = torch.zeros_like(q)
    for b in range(batch):
        block, rows = (0, slice(rooms[b], rooms[b + 1])) if rooms else (b, slice(None))
        one = q[block, :, rows]
        if one.shape[1] == 0:
            continue
        past = keys[b] - one.shape[1]
        distance = torch.arange(keys[b])[None] - torch.arange(one.shape[1])[:, None] - past
        mask = distance <= side["hi"]
        wanted[block, :, rows] = torch.nn.functional.scaled_dot_product_attention(
            one[None], of(k, b)[None], of(v, b)[None], attn_mask=mask, scale=0.3, enable_gqa=True
        )[0]
    tensors = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        (folder / name).write_bytes(tensor.numpy().tobytes())
        tensors.append({"path": str(folder / name), "dtype": "f32", "shape": tensor.shape, "strides": tensor.stride()})
    request = {"op": "load", "device": "cpu", "sets": [tensors], "sides": [side], "scale": 0.3, "mask": "band", "lo": 0, "hi": 0}
    return request, wanted


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_and_paged_problems_are_asked_sequence_by_sequence(child, folder, case, causal):
    for backend, kv_heads in [("looped", 2), ("flex", 2), ("nested", 4)]:
        request, wanted = served(folder, case, 4, kv_heads, causal)
        assert child.ask(**request) == {}
        assert child.ask(op="find", backend=backend) == {}
        answer = child.ask(op="save", backend=backend, path=str(folder / "o"))
        if backend == "nested" and case != "packed":
            refused = "all of them in use" if not case.startswith("packed") else "torch's causal one"
            if not case.startswith("packed") or causal:
                assert refused in answer["error"], case
                continue
        if backend == "nested" and causal:
            continue  # torch asks for a GPU then
        assert answer == {}, (backend, case)
        ours = torch.frombuffer(bytearray((folder / "o").read_bytes()), dtype=torch.float32).reshape(wanted.shape)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{backend} {case}: {text}")


@pytest.fixture(scope="module")
def child_of_vllm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "by_definition.py").write_text(DEFINITION)
    (folder / "packed.py").write_text(PACKED)
    (folder / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    (folder / "vllm" / "vllm_flash_attn" / "flash_attn_interface.py").write_text(PACKED_VLLM)
    child = Child(folder)
    assert "version" in child.ask(op="hello", threads=1)
    yield child
    child.process.kill()


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("package", ["child", "child_of_vllm"])
def test_flash_attention_3_is_asked_by_its_packed_form(request, folder, case, causal, package):
    child = request.getfixturevalue(package)
    asked, wanted = served(folder, case, 4, 2, causal)
    assert child.ask(**asked) == {}
    assert child.ask(op="find", backend="flash-attn-3") == {}
    assert child.ask(op="save", backend="flash-attn-3", path=str(folder / "o")) == {}
    ours = torch.frombuffer(bytearray((folder / "o").read_bytes()), dtype=torch.float32).reshape(wanted.shape)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_flash_attention_3_is_not_asked_for_left_padding(child, folder):
    asked, _ = served(folder, "filled", 4, 2, True)
    asked["sides"][0]["leftpad_kv"] = [0, 1, 2]
    assert child.ask(**asked) == {}
    assert child.ask(op="find", backend="flash-attn-3") == {}
    assert "not asked of it" in child.ask(op="save", backend="flash-attn-3", path=str(folder / "o"))["error"]


def test_the_forward_alone_is_flash_attention_3_too(tmp_path):
    (tmp_path / "by_definition.py").write_text(DEFINITION)
    (tmp_path / "packed.py").write_text(PACKED)
    (tmp_path / "fa3_fwd_interface.py").write_text(FLASH.replace("RESULT", "out.transpose(1, 2)") + PACKED_OWN)
    child = Child(tmp_path)
    assert "version" in child.ask(op="hello", threads=1)
    shape = (2, 4, 2, 5, 7, 8)
    tensors = load(child, tmp_path, shape, -UNBOUNDED, 2)
    torch.testing.assert_close(output(child, tmp_path, "flash-attn-3", shape), expected(tensors, -UNBOUNDED, 2), rtol=1e-5, atol=1e-5)
    child.process.kill()


def test_vllms_package_has_no_dense_form(child_of_vllm, folder):
    load(child_of_vllm, folder, (1, 2, 2, 3, 3, 8), -UNBOUNDED, UNBOUNDED)
    assert child_of_vllm.ask(op="find", backend="flash-attn-3") == {}
    assert "packed sequences and caches alone" in child_of_vllm.ask(op="save", backend="flash-attn-3", path=str(folder / "o"))["error"]


def test_each_kind_of_problem_has_its_own_baselines(child, folder):
    request, _ = served(folder, "packed", 4, 2, True)
    child.ask(**request)
    assert "dense problems" in child.ask(op="save", backend="default", path=str(folder / "o"))["error"]
    assert "share key/value heads" in child.ask(op="save", backend="nested", path=str(folder / "o"))["error"]
    load(child, folder, (1, 2, 2, 3, 3, 8), -UNBOUNDED, UNBOUNDED)
    assert "packed and paged problems" in child.ask(op="save", backend="looped", path=str(folder / "o"))["error"]


def test_what_is_not_installed_says_so(tmp_path):
    (tmp_path / "flash_attn.py").write_text("import a_module_that_is_missing")
    child = Child(tmp_path)
    child.ask(op="hello", threads=1)
    absent = child.ask(op="find", backend="flash-attn-3")["error"]
    modules = ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface", "vllm.vllm_flash_attn.flash_attn_interface"]
    wanted = f"{' or '.join(modules)} is not installed in"
    assert absent.startswith(wanted)
    broken = child.ask(op="find", backend="flash-attn-2")["error"]
    assert broken == "flash_attn cannot be imported: No module named 'a_module_that_is_missing'"
    assert child.ask(op="find", backend="cudnn") == {}
    child.process.kill()
