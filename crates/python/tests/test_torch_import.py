"""`evosdpa import`: answers to exported tasks, honest and not, through the lab's gates."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples" / "submissions"
HONEST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal
    def forward(self, q, k, v):
        @BODY@
"""
SDPA = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)"
# A clock that runs fifty times too slowly, in the process that is timed.
PATCHED = f"""
        import __main__
        if not hasattr(ModelNew, "clock"):
            ModelNew.clock = __main__.now
            __main__.now = lambda: ModelNew.clock() // 50
        return {SDPA}
"""


def evosdpa(folder, *arguments):
    command = [sys.executable, "-m", "evosdpa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for tool in ("kernelbench", "gpumode"):
        done = evosdpa(folder, "export", tool, "--shape", "b1h2s96d32:causal", "--dtype", "f32", "--out", tool)
        assert done.returncode == 0, done.stderr
    return folder


def imported(folder, tool, path, *said):
    options = (*said, "--device", "cpu", "--threads", "1", "--python", sys.executable, "--iters", "20", "--json")
    done = evosdpa(folder, "import", tool, str(path), *options)
    assert done.returncode in (0, 1), done.stderr
    row = next(row for row in json.loads(done.stdout)["rows"] if row["kernel"] == "submission")
    assert row["problem"].startswith("b1h2s96d32"), row["problem"]
    return done.returncode, row


def test_the_exported_submission_is_evaluated(task):
    status, row = imported(task, "gpumode", task / "gpumode" / "submission.py")
    assert status == 0, row["gates"]
    assert row["p50_us"] > 0 and 0 < row["roofline"] < 1 and row["speedup"]["auto"]["ratio"] > 0
    assert [gate["gate"] for gate in row["gates"]] == ["correctness", "audit", "floor"]


@pytest.mark.parametrize(
    "body, gate, words",
    [
        ("return torch.zeros_like(q)", "correctness", ""),
        ("return " + SDPA + ".half()", "correctness", "it returned"),
        ("q.mul_(1.0001); return " + SDPA, "correctness", ""),
        (PATCHED, "audit", "foreign-clock"),
    ],
)
def test_what_is_wrong_is_turned_away(task, body, gate, words):
    path = task / "kernelbench" / "answer.py"
    path.write_text(HONEST.replace("@BODY@", body))
    status, row = imported(task, "kernelbench", path)
    failed = [known for known in row["gates"] if known["verdict"] == "FAIL"]
    assert status == 1 and row["p50_us"] is None, row["gates"]
    assert failed[0]["gate"] == gate and words in failed[0]["detail"], failed


def test_the_examples_are_what_they_say(tmp_path):
    said = ("--shape", "b1h2s96d32", "--dtype", "f32")
    status, row = imported(tmp_path, "kernelbench", EXAMPLES / "matmuls.py", *said)
    assert status == 0, row["gates"]
    status, row = imported(tmp_path, "gpumode", EXAMPLES / "cached.py", *said)
    failed = [gate["gate"] for gate in row["gates"] if gate["verdict"] == "FAIL"]
    assert status == 1 and failed[0] in ("correctness", "audit"), row["gates"]
