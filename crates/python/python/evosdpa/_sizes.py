"""Sizes that are not all known: those of a program that torch compiles or exports may be symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_compiling = torch.compiler.is_compiling


def holds(condition: Any) -> bool:
    """Whether something is so. What depends on the data of a compiled program, such as how many elements a mask picks, is not known
    before it runs: it counts as not so, where asking would be an error."""
    if not _compiling():
        return bool(condition)
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "guard_or_false"):  # before 2.7
        return bool(condition)
    return bool(symbolic_shapes.guard_or_false(condition))


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two shapes, or strides, are one."""
    return len(some) == len(others) and all(holds(one == other) for one, other in zip(some, others))
