"""What modifiers of scores and masks cost on a GPU, beside the plain problem, PyTorch's backends and FlashAttention-3.

usage: python modifiers.py OUT.json [--rounds N] [--tiny]      (a GPU and torch with CUDA)

Everything of a case is captured into CUDA graphs and replayed in turns in one process; times are medians. Every output is first held
against float32 attention on a few rows. Windows are compared with FlashAttention-3 where ``flash_attn_interface`` is there, and with
PyTorch's own build of FlashAttention-2. ``--tiny`` tries the program on a CPU. The exit status is 1 when an output is wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evosdpa

HEADS, DIM, WINDOW = 16, 128, 1024
ROWS = 8
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Problem:
    """Inputs ``[batch, heads, queries, dim]`` and the scores' changes, with the answer for some rows of the last head."""

    def __init__(self, bench: Bench, batch: int, queries: int, keys: int | None = None, causal: bool = True) -> None:
        make = lambda length: torch.randn(batch, length, HEADS, DIM, device=bench.device, dtype=torch.bfloat16).transpose(1, 2)  # noqa: E731
        keys = queries if keys is None else keys
        self.q, self.k, self.v = make(queries), make(keys), make(keys)
        self.causal = causal
        self.scores = lambda scores, rows: scores
        self.sink: float | None = None

    def by_token(self) -> tuple[torch.Tensor, ...]:
        return tuple(x.transpose(1, 2) for x in (self.q, self.k, self.v))

    def wrong(self, out: torch.Tensor) -> float:
        """The largest error of ``[batch, heads, queries, dim]``, as a share of 1e-3 and the rounding of weights and results."""
        rows = torch.linspace(0, self.q.size(2) - 1, ROWS).long().to(out.device)
        q, k, v = self.q[-1, -1, rows].float(), self.k[-1, -1].float(), self.v[-1, -1].float()
        scores = self.scores(q @ k.T * DIM**-0.5, rows)
        if self.causal:
            scores = scores.masked_fill(torch.arange(k.size(0), device=rows.device) > rows[:, None], -torch.inf)
        top = scores if self.sink is None else F.pad(scores, (0, 1), value=self.sink)
        weights = torch.softmax(top, -1)[:, : k.size(0)]
        wanted = weights @ v
        allowed = 1e-3 + 2.0**-7 * wanted.abs() + 2.0**-8 * weights.square().sum(-1, keepdim=True).sqrt() * 4
        return ((out[-1, -1, rows].float() - wanted).abs() / allowed).max().item()


class Bench:
    def __init__(self, rounds: int, tiny: bool, out: pathlib.Path) -> None:
        self.rounds, self.tiny, self.out = rounds, tiny, out
        self.device = torch.device("cpu" if tiny else "cuda")
        self.rows: list[dict] = []

    def length(self, length: int) -> int:
        return length // 64 if self.tiny else length

    def replayed(self, work, calls: int):
        if self.tiny:
            return work
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        return graph.replay

    def elapsed_us(self, replay, calls: int) -> float:
        if self.tiny:
            start = time.perf_counter()
            replay()
            return (time.perf_counter() - start) * 1e6
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        replay()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) * 1e3 / calls

    def compare(self, name: str, problems: dict, works: dict, against: str, aim: str) -> None:
        """``works`` by name, each for the problem of its name or of the first word of it; ``against`` is what ratios are to."""
        row: dict = {"case": name, "against": against, "aim": aim, "p50_us": {}, "error_share": {}, "unavailable": {}}
        calls, replays = 4, {}
        for side, work in works.items():
            try:
                problem = problems.get(side, problems["all"])
                row["error_share"][side] = round(problem.wrong(work()), 3)
                replays[side] = self.replayed(work, calls)
            except Exception as error:  # what a library does not take is no fault of ours
                row["unavailable"][side] = f"{type(error).__name__}: {str(error)[:160]}"
        samples: dict[str, list[float]] = {side: [] for side in replays}
        for turn in range(self.rounds + 2):
            for side in list(replays)[:: 1 if turn % 2 else -1]:
                taken = self.elapsed_us(replays[side], calls)
                if turn >= 2:
                    samples[side].append(taken)
        row["p50_us"] = {side: round(statistics.median(taken), 2) for side, taken in samples.items()}
        base = row["p50_us"].get(against)
        row["times"] = {side: round(taken / base, 3) for side, taken in row["p50_us"].items()} if base else {}
        row["verdict"] = "FAIL" if any(share > 1 for side, share in row["error_share"].items() if side.startswith("evosdpa")) else "PASS"
        self.rows.append({**row, "samples_us": samples})
        self.write()
        print(json.dumps({key: value for key, value in row.items() if key != "aim"}), flush=True)

    def write(self) -> None:
        """After every case: a library may end the process."""
        gpu = "none" if self.tiny else torch.cuda.get_device_name()
        environment = {"gpu": gpu, "torch": torch.__version__, "evosdpa": evosdpa.__version__, "rounds": self.rounds}
        document = {"schema": "evosdpa.modifiers/1", "environment": environment, "rows": self.rows}
        self.out.write_text(json.dumps(document, indent=1) + "\n")

    def modifiers(self, batch: int, length: int) -> None:
        """Softcap, sinks and ALiBi beside the plain causal problem."""
        length = self.length(length)
        plain = Problem(self, batch, length)
        slopes = torch.linspace(0.01, 0.1, HEADS, device=self.device)
        sinks = torch.linspace(-1.0, 2.0, HEADS, device=self.device)
        capped, sunk, sloped = (Problem.__new__(Problem) for _ in range(3))
        for other in (capped, sunk, sloped):
            other.__dict__.update(plain.__dict__)
        capped.scores = lambda scores, rows: 5.0 * torch.tanh(scores / 5.0)
        sunk.sink = sinks[-1].item()
        sloped.scores = lambda scores, rows: scores - slopes[-1] * (rows[:, None] - torch.arange(length, device=self.device)).abs()
        call = lambda **more: lambda: evosdpa.flash_attn_func(*plain.by_token(), causal=True, **more).transpose(1, 2)  # noqa: E731
        problems = {"all": plain, "evosdpa softcap": capped, "evosdpa sinks": sunk, "evosdpa alibi": sloped}
        works = {
            "evosdpa plain": call(),
            "evosdpa softcap": call(softcap=5.0),
            "evosdpa sinks": call(s_aux=sinks),
            "evosdpa alibi": call(alibi_slopes=slopes),
        }
        self.compare(f"b{batch}h{HEADS}s{length}d{DIM} causal, modifiers", problems, works, "evosdpa plain", "softcap 1.08, sinks and ALiBi 1.03")

    def dense(self, kind: str, batch: int, length: int) -> None:
        """A boolean mask for each sequence, or a bias for each head."""
        length = self.length(length)
        problem = Problem(self, batch, length, causal=False)
        if kind == "mask":
            given = torch.rand(batch, 1, length, length, device=self.device) < 0.5
            given[..., 0] = True
            problem.scores = lambda scores, rows: scores.masked_fill(~given[-1, 0, rows], -torch.inf)
        else:
            given = torch.randn(1, HEADS, length, length, device=self.device, dtype=torch.bfloat16)
            problem.scores = lambda scores, rows: scores + given[0, -1, rows].float()
        tensors = problem.q, problem.k, problem.v

        def torch_with(backend):
            def work():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*tensors, attn_mask=given)

            return work

        forward = lambda: torch.ops.evosdpa.forward(*tensors, None, -1, -1, False, True, False, False, **{kind: given})[0]  # noqa: E731
        works = {"evosdpa": forward, **{f"torch {name}": torch_with(backend) for name, backend in BACKENDS.items() if name != "flash"}}
        self.compare(f"b{batch}h{HEADS}s{length}d{DIM} {kind}", {"all": problem}, works, "evosdpa", "2.0 for PyTorch's best backend")

    def padding(self, batch: int, length: int) -> None:
        """Key padding beside a problem that has only the visible keys."""
        length = self.length(length)
        padded, short = Problem(self, batch, length, causal=False), Problem(self, batch, length, length // 2, causal=False)
        padded.scores = lambda scores, rows: scores.masked_fill(torch.arange(length, device=self.device) >= length // 2, -torch.inf)
        used = torch.full((batch,), length // 2, dtype=torch.int32, device=self.device)
        works = {
            "evosdpa visible keys alone": lambda: evosdpa.flash_attn_func(*short.by_token()).transpose(1, 2),
            "evosdpa padded": lambda: evosdpa.flash_attn_with_kvcache(*padded.by_token(), cache_seqlens=used).transpose(1, 2),
        }
        problems = {"all": padded, "evosdpa visible keys alone": short}
        self.compare(f"b{batch}h{HEADS}s{length}d{DIM}, half the keys padding", problems, works, "evosdpa visible keys alone", "0.95 to 1.05")

    def window(self, batch: int, length: int) -> None:
        length, window = self.length(length), self.length(WINDOW)
        problem = Problem(self, batch, length)
        problem.scores = lambda scores, rows: scores.masked_fill(
            torch.arange(length, device=self.device) < rows[:, None] - window, -torch.inf
        )
        tensors = problem.by_token()

        def fa3():
            import flash_attn_interface

            out = flash_attn_interface.flash_attn_func(*tensors, causal=True, window_size=(window, 0))
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        def fa2():
            flash = torch.ops.aten._flash_attention_forward
            found = flash(*tensors, None, None, length, length, 0.0, True, False, window_size_left=window, window_size_right=0)
            return found[0].transpose(1, 2)

        ours = lambda: evosdpa.flash_attn_func(*tensors, causal=True, window_size=(window, 0)).transpose(1, 2)  # noqa: E731
        for name, theirs in (("FlashAttention-2 of torch", fa2), ("FlashAttention-3", fa3)):
            case = f"b{batch}h{HEADS}s{length}d{DIM} causal, window {window}, beside {name}"
            self.compare(case, {"all": problem}, {"evosdpa": ours, name: theirs}, "evosdpa", "1.0 at least")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.rounds, arguments.tiny, arguments.out)
    torch.manual_seed(0)
    for batch, length in ((8, 2048), (4, 4096), (2, 8192)):
        bench.modifiers(batch, length)
    for kind in ("mask", "bias"):
        for batch, length in ((8, 2048), (2, 4096)):
            bench.dense(kind, batch, length)
    bench.padding(8, 2048)
    bench.padding(2, 8192)
    bench.window(1, 16384)
    return int(any(row["verdict"] == "FAIL" for row in bench.rows))


if __name__ == "__main__":
    sys.exit(main())
