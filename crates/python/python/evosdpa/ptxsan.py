"""CUDA kernels on a CPU, with their races and memory errors.

>>> import numpy
>>> from evosdpa import ptxsan
>>> source = '''
... __global__ void reverse(float* x) {
...     __shared__ float tile[64];
...     tile[threadIdx.x] = x[threadIdx.x];
...     x[threadIdx.x] = tile[63 - threadIdx.x];  // a barrier is missing
... }'''
>>> result = ptxsan.run(source, 1, 64, numpy.zeros(64, numpy.float32))
>>> result.findings[0].kind, result.findings[0].site.line
('race', 4)
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _native

__all__ = ["CompileError", "Error", "Finding", "Frame", "LaunchError", "Out", "Result", "Site", "Variable", "run"]


class Error(ValueError):
    """What was asked cannot be done. What a kernel does wrong is a :class:`Finding` instead."""


class CompileError(Error):
    """The source does not compile, is no PTX that can be read, or there is no compiler."""


class LaunchError(Error):
    """The launch breaks a limit, or its arguments do not fit the kernel."""


_ERRORS = {"compiler": CompileError, "compile": CompileError, "ptx": CompileError, "launch": LaunchError}


@dataclass(frozen=True)
class Out:
    """An array that the kernel must write as a whole: what was in it counts as never written."""

    array: Any


@dataclass(frozen=True)
class Frame:
    """A line of the CUDA source."""

    file: str
    line: int


@dataclass(frozen=True)
class Site:
    """A place in the code, and who was there."""

    source: str | None
    stack: tuple[Frame, ...]
    ptx_line: int
    opcode: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]

    @property
    def line(self) -> int | None:
        """The line of the kernel's own source, if it is known."""
        return self.stack[-1].line if self.stack else None


@dataclass(frozen=True)
class Variable:
    """The variable or array that a finding is about."""

    name: str
    space: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Finding:
    """One mistake: what showed at one pair of source lines."""

    kind: str
    severity: str
    detail: str
    advice: str | None
    site: Site
    other: Site | None
    variable: Variable | None
    count: int
    schedules: tuple[str, ...]

    def __str__(self) -> str:
        place = self.site.source or f"PTX line {self.site.ptx_line}"
        return f"{self.severity}: {self.kind} at {place}: {self.detail}" + (f" ({self.advice})" if self.advice else "")


@dataclass(frozen=True)
class Result:
    """What a kernel did, and did wrong."""

    entry: str
    name: str
    findings: tuple[Finding, ...]
    dropped: int
    output: str
    warp_instructions: int
    counters: dict[str, Any] = field(repr=False)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found that is worse than benign."""
        return self.dropped == 0 and all(finding.severity == "info" for finding in self.findings)


def run(
    source: str | os.PathLike[str],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    entry: str | None = None,
    shared: int = 0,
    cluster: int | Sequence[int] = 1,
    cooperative: bool = False,
    variables: Mapping[str, Any] | None = None,
    schedule: str = "round-robin",
    seed: int = 0,
    budget: int = 1 << 26,
    check_races: bool = True,
    arch: str = "sm_80",
    defines: Mapping[str, Any] | Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    nvrtc: Sequence[str] = (),
    file_name: str = "kernel.cu",
) -> Result:
    """Runs a kernel on the CPU and says what it does wrong.

    ``source`` is CUDA C++ (compiled with NVRTC) or PTX text, or the path of a file with either. ``args`` are the kernel's
    arguments: NumPy arrays are buffers and hold what the kernel left in them afterwards (a read-only array must not be written,
    ``Out(array)`` must be written whole); ``int`` and ``float`` take the parameter's size, NumPy scalars and ``bytes`` are passed as
    they are. ``entry`` is the kernel's name, with template arguments if it has some. ``variables`` sets ``__device__`` and
    ``__constant__`` variables by name; arrays among them are read back. With ``schedule="all"`` the launch is made under every
    schedule, and arrays hold what the last one left.

    Raises :class:`CompileError`, :class:`LaunchError` or :class:`Error` when nothing could be run.
    """
    text, name = _text(source, file_name)
    arrays: list[Any] = []
    passed = [_argument(index, arg, arrays) for index, arg in enumerate(args)]
    set_variables, read_back = _variables(variables or {})
    options = {
        "arch": arch,
        "defines": [f"{key}={value}" for key, value in defines.items()] if isinstance(defines, Mapping) else list(defines),
        "include": [os.fspath(folder) for folder in include] + ([os.path.dirname(name)] if os.path.dirname(name) else []),
        "nvrtc": list(nvrtc),
        "entry": entry,
        "grid": _extent("grid", grid),
        "block": _extent("block", block),
        "cluster": _extent("cluster", cluster),
        "shared": _count("shared", shared, 2**32 - 1),
        "cooperative": bool(cooperative),
        "seed": _count("seed", seed, 2**64 - 1),
        "budget": _count("budget", budget, 2**64 - 1),
        "check_races": bool(check_races),
        "schedule": schedule,
        "args": passed,
        "variables": set_variables,
    }
    _native.suggest_packages(sysconfig.get_paths()["purelib"])
    refusal, answer = _native.sanitize(text, name, options)
    if refusal is not None:
        kind, message = refusal
        raise _ERRORS.get(kind, Error)(message)
    document, buffers, values = answer
    for array, left in zip(arrays, buffers):
        _put_back(array, left)
    for array, left in zip(read_back, values):
        if array is not None:
            _put_back(array, left)
    return _result(json.loads(document))


def _text(source: str | os.PathLike[str], file_name: str) -> tuple[str, str]:
    if not isinstance(source, os.PathLike):
        if not isinstance(source, str):
            raise TypeError(f"source is a {type(source).__name__}; give CUDA C++ or PTX as str, or a pathlib.Path of a file")
        return source, file_name
    path = os.fspath(source)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(), path
    except UnicodeDecodeError as error:
        raise CompileError(f"{path} is not UTF-8 text: give CUDA source or PTX text") from error


def _argument(index: int, arg: Any, arrays: list[Any]) -> tuple[str, Any]:
    import numpy

    is_output = isinstance(arg, Out)
    value = arg.array if isinstance(arg, Out) else arg
    if isinstance(value, numpy.ndarray):
        _check_array(f"argument {index}", value)
        if is_output and not value.flags.writeable:
            raise LaunchError(f"argument {index} is an output in a read-only array; give a writable one")
        arrays.append(value)
        return "buffer", (f"arg{index}", value.tobytes(), not value.flags.writeable, is_output)
    if is_output:
        raise TypeError(f"argument {index}: Out is for NumPy arrays, not for a {type(value).__name__}")
    if isinstance(value, numpy.generic):
        return "raw", value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        return "raw", bytes(value)
    if isinstance(value, int):
        return "int", _count(f"argument {index}", value, 2**64 - 1, -(2**63))
    if isinstance(value, float):
        return "float", value
    raise TypeError(f"argument {index} is a {type(value).__name__}; give a NumPy array or scalar, an int, a float or bytes")


def _check_array(what: str, array: Any) -> None:
    if array.dtype.hasobject:
        raise LaunchError(f"{what} holds Python objects; give an array of numbers")
    if not array.dtype.isnative:
        raise LaunchError(f"{what} is in the other byte order; give array.astype(array.dtype.newbyteorder('='))")
    if not array.flags.c_contiguous:
        raise LaunchError(f"{what} is not contiguous; give numpy.ascontiguousarray(array), and copy back what you need")


def _variables(named: Mapping[str, Any]) -> tuple[list[tuple[str, bytes]], list[Any]]:
    import numpy

    given, read_back = [], []
    for name, value in named.items():
        if isinstance(value, (bytes, bytearray)):
            given.append((name, bytes(value)))
            read_back.append(None)
            continue
        if not isinstance(value, (numpy.ndarray, numpy.generic)):
            kind = type(value).__name__
            raise TypeError(f"variable {name!r} is a {kind}; give a NumPy array or scalar, such as numpy.float32(2), or bytes")
        array = numpy.asarray(value)
        _check_array(f"variable {name!r}", array)
        given.append((name, array.tobytes()))
        read_back.append(value if isinstance(value, numpy.ndarray) and value.flags.writeable else None)
    return given, read_back


def _put_back(array: Any, left: bytes) -> None:
    import numpy

    if array.flags.writeable:
        array[...] = numpy.frombuffer(left, dtype=array.dtype).reshape(array.shape)


def _extent(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not 1 <= len(parts) <= 3:
        raise LaunchError(f"{name} is {value!r}; give one to three whole numbers, such as 32, (32, 8) or (32, 8, 2)")
    x, y, z = [_count(name, part, 2**32 - 1, 1) for part in parts] + [1] * (3 - len(parts))
    return x, y, z


def _count(name: str, value: Any, most: int, least: int = 0) -> int:
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name} is {value!r}; give a whole number") from None
    if not least <= number <= most:
        raise LaunchError(f"{name} is {number}; give a whole number from {least} to {most}")
    return int(number)


def _result(document: dict[str, Any]) -> Result:
    findings = tuple(_finding(finding) for finding in document.pop("findings"))
    return Result(findings=findings, **document)


def _finding(found: dict[str, Any]) -> Finding:
    found["site"] = _site(found["site"])
    found["other"] = _site(found["other"]) if found["other"] else None
    found["variable"] = Variable(**found["variable"]) if found["variable"] else None
    found["schedules"] = tuple(found["schedules"])
    return Finding(**found)


def _site(site: dict[str, Any]) -> Site:
    site["stack"] = tuple(Frame(**frame) for frame in site["stack"])
    site["block"], site["thread"] = tuple(site["block"]), tuple(site["thread"])
    return Site(**site)
