"""The command line from Python, and the examples in the documentation."""

import doctest
import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

import evosdpa

ROOT = pathlib.Path(__file__).resolve().parents[3]


def command(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "evosdpa", *arguments], capture_output=True, text=True, **options)


def test_the_program_is_reached():
    assert command("--version").stdout.strip() == f"evosdpa {evosdpa.__version__}"
    listed = command("kernels", "--json")
    names = {row["name"] for row in json.loads(listed.stdout)["rows"]}
    assert {"cpu_flash", "sdpa_v1", "hopper_fwd"} <= names, "kernels travel inside the wheel"


def test_exit_codes():
    assert command("kernels").returncode == 0
    wrong = command("bench", "--shapes", "enormous")
    assert wrong.returncode == 2 and "enormous" in wrong.stderr
    tiny = ["--shapes", "b1h1s8d8", "--device", "cpu", "--dtype", "f32", "--kernels", "cpu_flash"]
    assert command("check", *tiny).returncode == 0
    assert command("check", *tiny, "--force", "zeros").returncode == 1


def test_the_program_starts_itself_again_to_compile(tmp_path):
    """Compile workers are processes; in Python they must be this package, not the bare interpreter."""
    source = tmp_path / "empty.cu"
    source.write_text("")
    worker = subprocess.run(
        [sys.executable, "-m", "evosdpa", "__compile-worker"], input="not json\n", capture_output=True, text=True, timeout=60
    )
    answer = json.loads(worker.stdout.splitlines()[0])
    assert answer["status"] == "failed", worker


def test_bench_returns_the_document(tmp_path):
    document = evosdpa.bench(["tiny"], device="cpu", iters=3, warmup=1, no_baselines=True, out=tmp_path)
    assert document["schema"] == "evosdpa.bench/1"
    (row,) = (row for row in document["rows"] if not row["peer"])
    assert (row["kernel"], row["variant"]) == ("auto", "cpu_flash") and row["p50_us"] > 0
    with pytest.raises(RuntimeError, match="nonsense"):
        evosdpa.bench("tiny", nonsense=1)


@pytest.mark.parametrize("name", ["evosdpa", "evosdpa._api", "evosdpa._flash", "evosdpa._patch", "evosdpa._bench"])
def test_examples_in_docstrings(name):
    pytest.importorskip("torch") if name == "evosdpa._patch" else None
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 0 and result.failed == 0


def test_readme_examples_run():
    """Every Python block of the README that needs no GPU and no download."""
    text = (ROOT / "crates" / "python" / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    runnable = [block for block in blocks if "from_pretrained" not in block and "cuda" not in block]
    assert len(runnable) >= 3
    for block in runnable:
        if "torch" in block:
            pytest.importorskip("torch")
        if "transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, "README.md", "exec"), {})
