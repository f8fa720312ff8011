"""The command line's ``bench``, for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


def bench(shapes: str | Iterable[str] = ("mission", "small", "long"), **options: Any) -> dict[str, Any]:
    """Checks kernels, then times them side by side with this Python's PyTorch, and returns the JSON document of
    ``python -m evosdpa bench --json``: ``schema``, ``environment`` and ``rows``.

    Options are those of the command, by name: ``device="cpu"``, ``dtype=["bf16"]``, ``iters=50``, ``no_baselines=True``.
    A row whose gates did not pass has no times.

    >>> import evosdpa
    >>> document = evosdpa.bench("tiny", device="cpu", iters=3, warmup=1, no_baselines=True, out="/tmp/evosdpa-doctest")
    >>> sorted(row["kernel"] for row in document["rows"] if not row["peer"])
    ['auto']
    """
    arguments = ["bench", "--json", "--shapes", _listed(shapes)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not False and value is not None:
            arguments += [flag, _listed(value)]
    command = [sys.executable, "-m", "evosdpa", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    # 1 says that a gate failed, which the rows tell as well.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command[2:])} ended with status {done.returncode}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _listed(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)) or not isinstance(value, Iterable):
        return str(value)
    return ",".join(str(part) for part in value)
