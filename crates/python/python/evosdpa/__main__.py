"""``python -m evosdpa``: the commands of the ``evosdpa`` program."""

from __future__ import annotations

import signal
import sys

from . import _native

# Commands that look for PyTorch: in this Python, unless told otherwise.
_WITH_PYTHON = ("bench", "doctor")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    named = any(argument.split("=")[0] == "--python" for argument in arguments)
    if arguments and arguments[0] in _WITH_PYTHON and not named:
        arguments += ["--python", sys.executable]
    # Ctrl-C is the commands' own business; Python would only look at it when they are done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    return _native.run(sys.executable, arguments)


if __name__ == "__main__":
    sys.exit(main())
