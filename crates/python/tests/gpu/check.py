"""The package on a GPU: values, strides, streams, graphs, threads, the operator, a model, and what a call costs.

usage: python check.py OUT.json      (a GPU, torch with CUDA, transformers; nothing is downloaded)

Each section is recorded with its numbers, or with why it failed; the exit status is 1 when one did.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import traceback

import torch
import torch.nn.functional as F

import evosdpa

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import oracle as families  # noqa: E402

ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
GPU = torch.device("cuda")
found: dict[str, dict] = {}


def section(work):
    """Runs a section and keeps what it returns."""
    start = time.perf_counter()
    try:
        result = {"verdict": "PASS", **(work() or {})}
        torch.cuda.synchronize()
    except Exception as error:  # every section is to be heard
        result = {"verdict": "FAIL", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    result["seconds"] = round(time.perf_counter() - start, 2)
    found[work.__name__] = result
    print(work.__name__, json.dumps({name: value for name, value in result.items() if name != "trace"}), flush=True)
    return work


def oracle(q, k, v, scale=None, left=-1, right=-1, bottom_right=False):
    """``(out, lse)`` in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if scale is None else scale)
    offset = k.size(2) - q.size(2) if bottom_right else 0
    distance = torch.arange(k.size(2), device=GPU)[None] - torch.arange(q.size(2), device=GPU)[:, None] - offset
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
    return weights @ v, torch.logsumexp(scores, -1)


def share(out, wanted, value_scale=1.0):
    """The largest error as a share of what is allowed; above 1 is wrong."""
    assert out.shape == wanted.shape, (out.shape, wanted.shape)
    assert not out.isnan().any(), "NaN in the output"
    allowed = 1e-3 * value_scale + ROUNDING[out.dtype] * wanted.abs()
    worst = ((out.double() - wanted).abs() / allowed).max().item()
    assert worst <= 1.0, f"the error is {worst:.2f} times what is allowed"
    return round(worst, 4)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=GPU, dtype=dtype)


@section
def environment():
    doctor = subprocess.run([sys.executable, "-m", "evosdpa", "doctor"], capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "evosdpa": evosdpa.__version__,
        "doctor": doctor.stdout.splitlines(),
    }


@section
def first_call_s():
    """From a fresh process to the first result: NVRTC is found and a kernel is compiled."""
    x = normal(1, 8, 512, 64)
    start = time.perf_counter()
    evosdpa.sdpa(x, x, x)
    torch.cuda.synchronize()
    return {"first_call_s": round(time.perf_counter() - start, 3)}


@section
def values_by_family():
    worst = {}
    for dtype in (torch.bfloat16, torch.float16):
        for family in families.FAMILIES:
            shapes = [(2, 4, 63, 64), (2, 2, 65, 64), (2, 2, 65, 64)]
            drawn = families.inputs(family, shapes, largest=16384.0)
            q, k, v = (torch.from_numpy(x).to(GPU, dtype) for x in drawn)
            value_scale = v.double().abs().max().item() if family == "max-values" else 1.0
            for causal in (False, True):
                out = evosdpa.sdpa(q, k, v, is_causal=causal, enable_gqa=True)
                wanted, _ = oracle(q, k, v, right=0 if causal else -1)
                name = f"{family} {str(dtype)[6:]}{' causal' if causal else ''}"
                worst[name] = share(out, wanted, value_scale)
    return {"worst_share": max(worst.values()), "cases": len(worst)}


@section
def shapes_masks_and_lse():
    worst = {}
    cases = [(1, 1, 64), (64, 128, 40), (239, 1, 80), (113, 203, 128), (1, 2048, 128), (513, 511, 96), (128, 192, 256), (33, 65, 32)]
    for queries, keys, dim in cases:
        q, k, v = normal(2, queries, 4, dim), normal(2, keys, 2, dim), normal(2, keys, 2, dim)
        for causal, window in [(False, (-1, -1)), (True, (-1, -1)), (True, (31, 0))]:
            out, lse = evosdpa.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
            left, right = window[0], 0 if causal else window[1]
            views = [x.transpose(1, 2) for x in (q, k, v)]
            wanted, wanted_lse = oracle(*views, left=left, right=right, bottom_right=True)
            worst[f"{queries}/{keys} d{dim} {causal} {window}"] = share(out.transpose(1, 2), wanted)
            assert out.is_contiguous()
            torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=2e-3)
    return {"worst_share": max(worst.values()), "cases": len(worst)}


@section
def strides_in_place():
    packed = normal(2, 100, 3, 4, 64)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = evosdpa.sdpa(q, k, v)
    share(out, oracle(q, k, v)[0])
    assert out.transpose(1, 2).is_contiguous(), "the output lies as the queries do"
    block = torch.full((2, 4, 40, 96), torch.nan, device=GPU, dtype=torch.bfloat16)
    block[:, ::2, 3:23, :64] = normal(2, 2, 20, 64)
    gaps = block[:, ::2, 3:23, :64]
    share(evosdpa.sdpa(gaps, gaps, gaps, is_causal=True), oracle(gaps, gaps, gaps, right=0)[0])
    shared = gaps[:1].expand(2, -1, -1, -1)
    share(evosdpa.sdpa(gaps, shared, shared), oracle(gaps, shared, shared)[0])
    odd = normal(2 * 4 * 20 * 64 + 1)[1:].view(2, 4, 20, 64)
    share(evosdpa.sdpa(odd, odd, odd), oracle(odd, odd, odd)[0])


@section
def refusals():
    x = torch.randn(1, 2, 8, 64, device=GPU)
    cases = [((x,) * 3, {}), ((x.bfloat16(),) * 3, {"dropout_p": 0.1}), ((normal(1, 2, 8, 512),) * 3, {})]
    cases.append(((x.bfloat16().requires_grad_(),) * 3, {}))
    for tensors, arguments in cases:
        try:
            evosdpa.sdpa(*tensors, **arguments)
        except NotImplementedError:
            pass
        else:
            raise AssertionError(f"not refused: {arguments} {tensors[0].dtype} {tuple(tensors[0].shape)}")
        assert evosdpa.sdpa(*tensors, **arguments, fallback=True).shape == tensors[0].shape
    try:
        evosdpa.sdpa(x.bfloat16(), x.bfloat16().cpu(), x.bfloat16())
    except ValueError as error:
        assert "cuda:0" in str(error)


@section
def current_stream():
    """Work before and after on the same side stream, with nobody waiting in between."""
    x, zeros = normal(2, 8, 512, 64), torch.zeros(2, 8, 512, 64, device=GPU, dtype=torch.bfloat16)
    wanted = evosdpa.sdpa(x, x, x)
    torch.cuda.synchronize()
    late = zeros.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        late.copy_(x)
        out = evosdpa.sdpa(late, late, late)
        doubled = out * 2
    queued = not side.query()
    side.synchronize()
    assert torch.equal(doubled, wanted * 2)
    assert queued, "the call waited for the stream"


@section
def graph_capture_and_replay():
    q, k, v = normal(1, 16, 1024, 128), normal(1, 4, 1024, 128), normal(1, 4, 1024, 128)
    call = lambda: evosdpa.sdpa(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, call()), "a replay differs from a call"
        share(out, oracle(q, k, v, right=0)[0])
    held = torch.cuda.memory_allocated()
    for _ in range(20):
        call()
    assert torch.cuda.memory_allocated() == held, "calls leave memory behind"


@section
def first_call_inside_a_capture():
    """A problem never seen before: what must be compiled and loaded is, and is no part of the graph."""
    x = normal(3, 5, 77, 48)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = evosdpa.sdpa(x, x, x)
    graph.replay()
    share(out, oracle(x, x, x)[0])


@section
def a_thousand_calls_from_eight_threads():
    tensors = [normal(1, 8, 256 + 64 * i, 64) for i in range(4)]
    wanted = [evosdpa.sdpa(x, x, x) for x in tensors]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(125):
                    x = tensors[(number + i) % 4]
                    if not torch.equal(evosdpa.sdpa(x, x, x), wanted[(number + i) % 4]):
                        wrong.append(f"thread {number} call {i}")
        except Exception as error:
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong, wrong[:3]
    return {"calls": 1000}


@section
def operator():
    q, k, v = normal(2, 4, 9, 64), normal(2, 2, 12, 64), normal(2, 2, 12, 64)
    torch.library.opcheck(torch.ops.evosdpa.forward.default, (q, k, v, None, -1, 0, True, True, True))
    compiled = torch.compile(lambda q, k, v: evosdpa.sdpa(q * 2, k, v, is_causal=True, enable_gqa=True) + 1, fullgraph=True)
    wanted = evosdpa.sdpa(q * 2, k, v, is_causal=True, enable_gqa=True) + 1
    torch.testing.assert_close(compiled(q, k, v), wanted)


@section
def foreign_arrays():
    """CuPy's arrays by DLPack, if CuPy is there."""
    try:
        import cupy
    except ImportError:
        return {"verdict": "UNAVAILABLE", "why": "no cupy"}
    x = cupy.random.standard_normal((1, 4, 33, 64)).astype(cupy.float16)
    out = evosdpa.sdpa(x, x, x)
    assert isinstance(out, cupy.ndarray)
    tensor = torch.from_dlpack(x)
    return {"worst_share": share(torch.from_dlpack(out), oracle(tensor, tensor, tensor)[0])}


def interleaved_ms(works, rounds=30):
    """Medians of GPU time, the works taking turns."""
    samples = {name: [] for name in works}
    for round in range(rounds + 3):
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            if round >= 3:
                samples[name].append(begin.elapsed_time(end))
    return samples


@section
def llama():
    """A randomly initialised model of Llama's shape: the same logits, no slower."""
    import transformers

    import evosdpa.transformers  # noqa: F401

    def model(implementation):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=12,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            attn_implementation=implementation,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with GPU:
                return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    ours = model("evosdpa")
    theirs = model("sdpa")
    theirs.load_state_dict(ours.state_dict())
    plain = model("eager")
    plain.load_state_dict(ours.state_dict())
    report: dict = {"transformers": transformers.__version__}
    with torch.inference_mode():
        tokens = torch.randint(0, 32000, (1, 1024), device=GPU)
        logits = {name: m(tokens).logits.float() for name, m in [("ours", ours), ("sdpa", theirs), ("eager", plain)]}
        noise = (logits["eager"] - logits["sdpa"]).abs()
        difference = (logits["ours"] - logits["sdpa"]).abs()
        report["logits_std"] = round(logits["sdpa"].std().item(), 4)
        report["difference_max"], report["noise_max"] = difference.max().item(), noise.max().item()
        report["difference_mean"], report["noise_mean"] = difference.mean().item(), noise.mean().item()
        assert difference.mean() <= 1.2 * noise.mean() and difference.max() <= 2 * noise.max(), report
        del logits, plain
        for batch, length in [(1, 1024), (1, 4096), (4, 2048)]:
            tokens = torch.randint(0, 32000, (batch, length), device=GPU)
            works = {name: (lambda m=m: m.model(tokens)) for name, m in [("evosdpa", ours), ("sdpa", theirs)]}
            samples = interleaved_ms(works, 15)
            medians = {name: statistics.median(values) for name, values in samples.items()}
            report[f"prefill b{batch} s{length}"] = {
                **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
                "ratio": round(medians["sdpa"] / medians["evosdpa"], 4),
            }
        prompt = torch.randint(0, 32000, (1, 512), device=GPU)
        settings = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
        works = {name: (lambda m=m: m.generate(prompt, **settings)) for name, m in [("evosdpa", ours), ("sdpa", theirs)]}
        samples = interleaved_ms(works, 4)
        report["generate 512+32"] = {f"{name}_ms": round(statistics.median(x), 1) for name, x in samples.items()}
    slow = [name for name, row in report.items() if isinstance(row, dict) and row.get("ratio", 1.0) < 0.98]
    assert not slow, f"slower than sdpa at {slow}: {report}"
    return report


@section
def dense_masks():
    """Computed by direct calls, and torch's own under ``patch()``."""
    q, k, v = (normal(2, 4, 65, 64) for _ in range(3))
    for mask in (normal(2, 1, 65, 65), normal(65, 65) > 0, (normal(2, 1, 1, 65) > 0)):
        wanted = F.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(evosdpa.sdpa(q, k, v, mask), wanted, rtol=2e-2, atol=2e-2)
        with evosdpa.patch():
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), wanted)


@section
def attention_alone():
    """Attention by itself in CUDA graphs of 20 calls, beside torch's choice."""
    rows = {}
    for batch, heads, length, dim in [(1, 8, 512, 64), (2, 8, 2048, 64), (2, 8, 2048, 128), (1, 32, 8192, 128)]:
        q, k, v = (normal(batch, heads, length, dim) for _ in range(3))
        graphs = {}
        for name, function in [("evosdpa", evosdpa.sdpa), ("torch", F.scaled_dot_product_attention)]:
            function(q, k, v, is_causal=True)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(20):
                    function(q, k, v, is_causal=True)
        samples = interleaved_ms({name: graph.replay for name, graph in graphs.items()}, 20)
        rows[f"b{batch}h{heads}s{length}d{dim}:causal bf16"] = {
            f"{name}_us": round(statistics.median(values) / 20 * 1e3, 2) for name, values in samples.items()
        }
    return rows


@section
def overhead():
    root = pathlib.Path(__file__).resolve().parents[4]
    script = root / "examples" / "python" / "overhead.py"
    reports = {}
    for device in ("cuda", "cpu"):
        done = subprocess.run([sys.executable, str(script), "--device", device, "--json"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-800:]
        reports[device] = {name: round(x, 2) if isinstance(x, float) else x for name, x in json.loads(done.stdout).items()}
    assert all(report["overhead_us"] < 10 for report in reports.values()), reports
    return reports


failed = [name for name, result in found.items() if result["verdict"] == "FAIL"]
document = {"schema": "evosdpa.python-gpu/1", "sections": found, "failed": failed}
pathlib.Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
print(f"{len(found) - len(failed)} of {len(found)} sections passed", *failed)
sys.exit(1 if failed else 0)
