"""Whether PyTorch takes part.

PyTorch is bound at import, not at the first call: its operator must be registered before ``torch.compile`` meets it, in
whatever order a program imports the two.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType

#: The module that knows PyTorch, once it is bound.
torch_side: ModuleType | None = None


def _never() -> bool:
    return False


#: Whether a compiler of torch is reading the program instead of running it.
compiling: Callable[[], bool] = _never


def bind_if_installed() -> None:
    """Binds PyTorch if it is there and wanted."""
    global torch_side, compiling
    if os.environ.get("EVOSDPA_TORCH") == "0" or (_is_command_line() and "torch" not in sys.modules):
        return
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        from . import _cache_torch, _torch

        torch_side, compiling = _torch, _torch.is_read
        del _cache_torch  # registers its operators
        if "transformers" in sys.modules:
            from . import transformers  # noqa: F401  (registers)


def _is_command_line() -> bool:
    """Whether ``python -m evosdpa`` or the ``evosdpa`` script is starting, neither of which needs PyTorch here."""
    as_module = sys.argv[:1] == ["-m"] and "evosdpa" in sys.orig_argv
    return as_module or os.path.basename(sys.argv[0] if sys.argv else "") == "evosdpa"
