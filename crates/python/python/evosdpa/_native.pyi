from collections.abc import Callable, Sequence
from typing import Any

_Operand = tuple[int, tuple[int, ...], tuple[int, ...]]

__version__: str

HEAD_DIM_MAX: int
GPU_HEAD_DIM_MAX: int

def forward(
    dtype: int,
    q: _Operand,
    k: _Operand,
    v: _Operand,
    o: _Operand,
    lse: int,
    scale: float | None,
    window: tuple[int, int, bool],
    high: bool,
    ordinal: int,
    queue: int,
) -> None: ...
def straight(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    window: tuple[int, int, bool],
    enable_gqa: bool,
    flash_layout: bool,
    with_lse: bool,
    high: bool,
    threads: int,
    empty_like: Callable[[Any], Any],
) -> tuple[Any, Any] | None: ...
def use_exchange(capsule: Any) -> bool: ...
def suggest_packages(folder: str) -> None: ...
def run(python: str, arguments: Sequence[str]) -> int: ...
