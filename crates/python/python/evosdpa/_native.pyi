from collections.abc import Sequence
from typing import Any

_Operand = tuple[int, tuple[int, ...], tuple[int, ...]]

_Scores = tuple[Any, float, int, Any, Any]
_Rotary = tuple[tuple[int, _Operand], tuple[int, _Operand], bool]

__version__: str

HEAD_DIM_MAX: int
GPU_HEAD_DIM_MAX: int
GPU_HEAD_DIM_MAX_F32: int

def set_batch_invariant(on: bool) -> bool: ...
def set_batch_invariant_here(on: bool) -> bool: ...
def described(array: Any) -> _Operand: ...
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
    side: dict[str, Any] | None = None,
) -> None: ...
def check_lists(dtype: int, q: _Operand, k: _Operand, v: _Operand, side: dict[str, Any]) -> None: ...
def append(
    dtype: int,
    k_cache: _Operand,
    v_cache: _Operand,
    k: _Operand,
    v: _Operand,
    ordinal: int,
    queue: int,
    named: dict[str, Any],
) -> None: ...
def check_append(dtype: int, k_cache: _Operand, v_cache: _Operand, k: _Operand, v: _Operand, named: dict[str, Any]) -> None: ...
def check_call(
    dtype: int,
    q: _Operand,
    k: _Operand,
    v: _Operand,
    scale: float | None,
    window: tuple[int, int, bool],
    side: dict[str, Any],
    reads: bool,
) -> None: ...
def rotate(
    dtype: int,
    x: _Operand,
    out: _Operand,
    rotary: _Rotary,
    first: tuple[int, int],
    cu_seqlens: tuple[int, int] | None,
    advance: bool,
    ordinal: int,
    queue: int,
) -> None: ...
def check_rotate(
    dtype: int, x: _Operand, rotary: _Rotary, first: tuple[int, int], cu_seqlens: tuple[int, int] | None, advance: bool
) -> None: ...
def straight(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    window: tuple[int, int, bool] | bool,
    enable_gqa: bool,
    flash_layout: bool,
    with_lse: bool,
    high: bool,
    out_by_token: bool = False,
    scores: _Scores | None = None,
    numpy: bool = False,
) -> Any: ...
# The same for packed sequences and caches, of NumPy's arrays too: tensors, new tokens, cosines and sines, then ``cu_seqlens_q``,
# ``cu_seqlens_k``, ``cu_seqlens_k_new``, ``seqused_q``, ``seqused_k``, ``leftpad_k``, ``cache_batch_idx``, ``rotary_seqlens`` and
# ``page_table``, then the scales of 8-bit keys and values.
def straight_cache(
    tensors: tuple[Any, Any, Any],
    new: tuple[Any, Any] | None,
    angles: tuple[Any, Any] | None,
    lists: tuple[Any, ...],
    scales: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    scale: float | None,
    window: tuple[int, int, bool],
    interleaved: bool,
    with_lse: bool,
    high: bool,
    one_query: bool = False,
    planned: tuple[int, ...] | None = None,
    scores: _Scores | None = None,
) -> Any: ...
def use_torch(exchange: Any, parts: dict[str, Any]) -> bool: ...
def suggest_packages(folder: str) -> None: ...
def suggest_precompiled(folder: str) -> None: ...
def run(python: str, arguments: Sequence[str]) -> int: ...
def sanitize(
    text: str, file_name: str, options: dict[str, Any]
) -> tuple[tuple[str, str] | None, tuple[str, list[bytes], list[bytes]] | None]: ...
def ending() -> None: ...
