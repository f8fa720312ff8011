"""What evosdpa's programs in Python begin with: JSON lines, one request on standard input, one answer on standard output."""

import json
import os
import sys

# Libraries and submissions may print what they like; answers go through a descriptor of our own.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


class Refusal(Exception):
    """What is said without its type: nothing went wrong."""


def serve(session_of):
    """Answers requests by the methods of a session, until there are no more."""
    try:
        import torch
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is the answer
        answer(error=f"torch not importable: {problem}")
        return
    torch.set_grad_enabled(False)
    session = session_of(torch)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "hello":
                torch.set_num_threads(request["threads"])
                answer(version=torch.__version__, threads=torch.get_num_threads(), cuda=torch.cuda.is_available())
            else:
                answer(**getattr(session, request["op"])(request))
        except Refusal as problem:
            answer(error=str(problem))
        except BaseException as problem:  # noqa: BLE001 - a submission may raise anything
            answer(error=f"{type(problem).__name__}: {problem}")
