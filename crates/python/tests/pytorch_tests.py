"""PyTorch's own tests of attention, with and without ``evosdpa.patch()``: none may fail with it that passes without.

usage: python pytorch_tests.py TESTS OUT.json [--only FILE …] [--most N]

``TESTS`` is the folder ``test`` of PyTorch's source, of the version that is installed or near it; the packages ``pytest``,
``expecttest`` and ``hypothesis`` are needed too. Each file runs in two processes: as it is, and with
``torch.nn.functional.scaled_dot_product_attention`` replaced before anything of the file is imported. A test that fails with
evosdpa alone is run again, both ways, before it counts. ``OUT.json`` gets the counts, every test that differs, and how many
calls evosdpa computed. The exit status is 1 when a test fails with evosdpa alone.

``--most 64`` runs at most 64 cases of each test, evenly spread over all that it has: of the 3,363 cases of test_transformers.py
3,072 are one test with other numbers. Two processes run at a time, each on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

_OPERATOR = "scaled_dot_product_attention"
#: Which tests of which files; all of a file when nothing is said.
FILES = {
    "test_transformers.py": "",
    "nn/test_multihead_attention.py": "",
    "test_native_mha.py": "",
    "test_nn.py": "Transformer or transformer or attention",
    "test_modules.py": "Transformer or MultiheadAttention",
    "test_ops.py": _OPERATOR,
    "test_ops_gradients.py": _OPERATOR,
    "test_ops_fwd_gradients.py": _OPERATOR,
    "test_ops_jit.py": _OPERATOR,
    "test_decomp.py": f"{_OPERATOR} or sdpa",
    "test_meta.py": f"{_OPERATOR} or attention",
    "test_proxy_tensor.py": _OPERATOR,
    "test_fake_tensor.py": "sdpa or attention",
    "test_overrides.py": "",
    "test_flop_counter.py": "",
    "test_nestedtensor.py": "sdpa or attention or mha",
    "test_jit.py": "transformer or Transformer or multi_head or attention",
    "test_fx.py": f"{_OPERATOR} or transformer or attention",
    "functorch/test_ops.py": _OPERATOR,
    "functorch/test_vmap.py": f"{_OPERATOR} or sdpa",
    "functorch/test_aotdispatch.py": f"{_OPERATOR} or Transformer or MultiheadAttention",
    "dynamo/test_sdpa.py": "",
    "dynamo/test_ctx_manager.py": "sdpa",
    "dynamo/test_repros.py": "sdpa or attention",
    "dynamo/test_unspec.py": "attention",
    "dynamo/test_activation_checkpointing.py": "sdpa or attention",
    "export/test_export.py": "sdpa or attention",
    "higher_order_ops/test_invoke_subgraph.py": "sdpa",
    "inductor/test_fused_attention.py": "",
    "inductor/test_torchinductor.py": "sdpa or attention",
    "inductor/test_cpu_repro.py": "sdpa or attention",
    "inductor/test_unbacked_symints.py": "sdpfa or sdfpa",
    "inductor/test_aot_inductor.py": "sdpa or attention",
    "distributed/tensor/test_attention.py": "",
    "distributed/tensor/test_matrix_ops.py": _OPERATOR,
    "distributed/tensor/test_dtensor_ops.py": _OPERATOR,
}
#: A process that says nothing for so long hangs.
LIMIT_S = 3600


class Outcomes:
    """A plugin of pytest that keeps what became of each test."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.collected = 0
        self.found: dict[str, str] = {}
        self.said: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items) -> None:
        self.collected = len(items)
        cases = defaultdict(list)
        for item in items:
            cases[item.parent.nodeid, of_test(item.name)].append(item)
        chosen = {id(item) for group in cases.values() for item in spread(group, self.most)}
        items[:] = [item for item in items if id(item) in chosen]

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.found[name] = "failed"
            self.said[name] = said_of(report)
        elif report.skipped:
            self.found.setdefault(name, "skipped")
        elif report.when == "call":
            self.found.setdefault(name, "passed")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.found["collection"] = "failed"
            self.said["collection"] = said_of(report)


def said_of(report) -> str:
    """What pytest prints of a failure, from the first line that the exception itself says."""
    lines = str(report.longrepr).splitlines()
    own = [line for line in lines if line.startswith("E ")]
    return "\n".join(own or lines)[-1500:]


def of_test(case: str) -> str:
    """PyTorch's names of cases are the test's and then its parameters, of which the first has a number."""
    return re.match(r"[^0-9]*", case)[0]


def spread(cases: list, most: int) -> list:
    """At most so many of them, or all with 0."""
    if not most or len(cases) <= most:
        return cases
    return [cases[place * len(cases) // most] for place in range(most)]


def work(patched: bool, file: str, select: str, most: int, names: list[str], out: str) -> None:
    """One file in this process."""
    calls = 0
    if patched:
        import evosdpa
        from evosdpa import _native, _torch

        def counted(function):
            def call(*args, **named):
                nonlocal calls
                result = function(*args, **named)
                calls += function is not straight or result is not None
                return result

            return call

        straight = _torch.straight
        _torch.straight, _native.forward = counted(straight), counted(_native.forward)
        evosdpa.patch().__enter__()
    outcomes = Outcomes(0 if names else most)
    chosen = [f"{file}::{name}" for name in names] or [file]
    arguments = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "--disable-warnings"]
    ended = pytest.main([*arguments, *(["-k", select] if select else []), *chosen], plugins=[outcomes])
    if not outcomes.found:
        outcomes.found["process"], outcomes.said["process"] = "failed", f"pytest ran nothing and ended with {ended}"
    document = {"outcomes": outcomes.found, "said": outcomes.said, "collected": outcomes.collected, "calls": calls}
    pathlib.Path(out).write_text(json.dumps(document))


def run(folder: pathlib.Path, file: str, patched: bool, most: int, names: list[str] | None = None) -> dict:
    """One file in a process of its own; that it crashed is an outcome too."""
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch, "out.json")
        command = [sys.executable, __file__, "--work", "patched" if patched else "plain", file, FILES[file], str(most), str(out)]
        # PyTorch's tests import each other, from the folder that they are in.
        path = os.pathsep.join([str(folder / file).rpartition("/")[0], str(folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        try:
            done = subprocess.run(
                [*command, *(names or [])], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            ended, said = done.returncode, done.stdout[-1500:] + done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            ended, said = None, f"no end after {LIMIT_S} s"
        seconds = round(time.monotonic() - start, 1)
        if not out.is_file():
            failed = {"outcomes": {"process": "failed"}, "said": {"process": f"ended with {ended}: {said}"}}
            return {**failed, "collected": 0, "calls": 0, "seconds": seconds}
        return {**json.loads(out.read_text()), "seconds": seconds}


def counts(outcomes: dict[str, str]) -> dict[str, int]:
    return {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}


def both(folder: pathlib.Path, file: str, most: int, names: list[str] | None = None) -> list[dict]:
    """As it is, and with evosdpa."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda patched: run(folder, file, patched, most, names), (False, True)))


def compare(folder: pathlib.Path, file: str, most: int) -> dict:
    plain, patched = both(folder, file, most)
    before, after = plain["outcomes"], patched["outcomes"]
    suspects = [name for name, outcome in after.items() if outcome == "failed" and before.get(name) != "failed"]
    again = [name for name in suspects if name in before]
    if again:
        # Some of PyTorch's tests fail now and then.
        first, second = (ran["outcomes"] for ran in both(folder, file, 0, again))
        suspects = [name for name in suspects if second.get(name, "failed") == "failed" and first.get(name) != "failed"]
    return {
        "file": file,
        "select": FILES[file],
        "cases": plain["collected"],
        "most": most,
        "plain": counts(before),
        "patched": counts(after),
        "calls_computed": patched["calls"],
        "seconds": [plain["seconds"], patched["seconds"]],
        "fails_patched_alone": {name: patched["said"].get(name, "") for name in suspects},
        "fails_plain_alone": sorted(name for name, outcome in before.items() if outcome == "failed" and after.get(name) == "passed"),
        "not_run_patched": sorted(before.keys() - after.keys()),
    }


def environment(folder: pathlib.Path) -> dict:
    import torch

    import evosdpa

    version = folder.parent / "version.txt"
    return {
        "evosdpa": evosdpa.__version__,
        "torch": torch.__version__,
        "tests": version.read_text().strip() if version.is_file() else "unknown version",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=pathlib.Path, help="the folder 'test' of PyTorch's source")
    parser.add_argument("out", type=pathlib.Path, help="where the JSON document goes")
    parser.add_argument("--only", nargs="+", choices=list(FILES), default=list(FILES), help="files to run")
    parser.add_argument("--most", type=int, default=0, help="run at most so many cases of each test; 0 for all")
    arguments = parser.parse_args()
    folder = arguments.tests.resolve()
    rows = []
    for file in arguments.only:
        if not (folder / file).is_file():
            parser.error(f"{folder / file} is not there; give the folder 'test' of PyTorch's source")
        row = compare(folder, file, arguments.most)
        rows.append(row)
        print(json.dumps({**row, "fails_patched_alone": list(row["fails_patched_alone"])}), flush=True)
        document = {"schema": "evosdpa.pytorch-tests/1", "environment": environment(folder), "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row["fails_patched_alone"] or row["not_run_patched"] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        mode, name, chosen, limit, to, *only = sys.argv[2:]
        work(mode == "patched", name, chosen, int(limit), only, to)
    else:
        sys.exit(main())
