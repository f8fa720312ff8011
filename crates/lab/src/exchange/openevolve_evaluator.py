"""An evaluator for OpenEvolve: a program is the CUDA source of @KERNEL@, and evosdpa judges it.

Stage 1 runs it on the simulator, which needs no GPU and finds races and stray accesses. Stage 2 times it on a GPU. A program that fails
a gate scores nothing, and the gate's words are its artifacts.
"""

import json
import os
import shutil
import subprocess
import tempfile

from openevolve.evaluation_result import EvaluationResult

HERE = os.path.dirname(os.path.abspath(__file__))
KERNEL, SHAPE, DTYPE = "@KERNEL@", "@SHAPE@", "@DTYPE@"
# The simulator is slow: the same kernel on something small.
SMALL = "@SMALL_SHAPE@"
PROGRAM = os.environ.get("EVOSDPA_PROGRAM", "evosdpa").split()


def evaluate_stage1(program_path):
    document, words = run(program_path, "check", "--device", "sim", "--kernels", KERNEL, "--shapes", SMALL)
    if document is None:
        return EvaluationResult({"combined_score": 0.0, "correct": 0.0}, {"stderr": words})
    failed = failures(document)
    correct = 0.0 if failed else 1.0
    return EvaluationResult({"combined_score": 0.01 * correct, "correct": correct}, {"stderr": failed})


def evaluate_stage2(program_path):
    document, words = run(program_path, "bench", "--device", "cuda", "--kernels", KERNEL, "--shapes", SHAPE)
    if document is None:
        return EvaluationResult({"combined_score": 0.01, "correct": 1.0}, {"stderr": words})
    failed = failures(document)
    own = next((row for row in document["rows"] if not row["peer"]), {})
    if failed or not own.get("p50_us"):
        return EvaluationResult({"combined_score": 0.0, "correct": 0.0}, {"stderr": failed})
    roofline = own["roofline"]
    faster = [comparison["ratio"] for name, comparison in own["speedup"].items() if name != KERNEL]
    metrics = {
        "correct": 1.0,
        "time_us": own["p50_us"],
        # What counts: the share of what the machine can do with these bytes and operations.
        "roofline": roofline,
        "speedup": min(faster) if faster else 0.0,
        "combined_score": roofline,
    }
    return EvaluationResult(metrics, {"variant": str(own.get("variant"))})


def evaluate(program_path):
    first = evaluate_stage1(program_path)
    return evaluate_stage2(program_path) if first.metrics["correct"] else first


def run(program_path, command, *arguments):
    """The command's document, or none and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = os.path.join(folder, "kernel")
        shutil.copytree(os.path.join(HERE, "kernel"), kernel)
        shutil.copyfile(program_path, os.path.join(kernel, "@SOURCE@"))
        line = [*PROGRAM, command, *arguments, "--dtype", DTYPE, "--kernel-path", kernel, "--json"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        return None, done.stderr


def failures(document):
    gates = [gate for row in document["rows"] for gate in row.get("gates", []) if gate["verdict"] == "FAIL"]
    return "\n".join(f"{gate['gate']}: {gate['detail']}" for gate in gates)
