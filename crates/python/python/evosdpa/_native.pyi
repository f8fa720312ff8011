from collections.abc import Sequence

_Operand = tuple[int, tuple[int, ...], tuple[int, ...]]

__version__: str

def forward_cpu(
    dtype: int,
    q: _Operand,
    k: _Operand,
    v: _Operand,
    o: _Operand,
    lse: int,
    scale: float | None,
    window: tuple[int, int, bool],
    threads: int,
) -> None: ...
def forward_cuda(
    dtype: int,
    q: _Operand,
    k: _Operand,
    v: _Operand,
    o: _Operand,
    lse: int,
    scale: float | None,
    window: tuple[int, int, bool],
    ordinal: int,
    stream: int,
) -> None: ...
def suggest_packages(folder: str) -> None: ...
def run(python: str, arguments: Sequence[str]) -> int: ...
