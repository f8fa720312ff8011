"""Tests of the installed package: never of the sources beside them."""

import pathlib

import pytest

import evosdpa

HERE = pathlib.Path(__file__).resolve().parent


def pytest_report_header() -> str:
    torch = pytest.importorskip("torch").__version__ if _has("torch") else "not installed"
    return f"evosdpa {evosdpa.__version__} at {evosdpa.__path__[0]}, torch {torch}"


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Without torch or JAX only what needs none is collected; a GPU's tests are a program of their own."""
    if collection_path.parent.name == "gpu":
        return True
    if any(collection_path.name.startswith(f"test_{library}") and not _has(library) for library in ("torch", "jax")):
        return True
    return None


def _has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None
