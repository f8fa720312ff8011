"""A program with and without ``evosdpa.patch()``: what both see, and how to compare it."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.nn.functional as F

import evosdpa

ORIGINAL = F.scaled_dot_product_attention

Q, K = (2, 4, 9, 16), (2, 4, 12, 16)
#: Enough work that float32 is ours too.
WORTH = (2, 4, 33, 16), (2, 4, 40, 16), (2, 4, 40, 16)


class Silent(torch.Tensor):
    """A subclass without opinions keeps its type."""


def drawn(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def outcome(work):
    """What a program sees: its result, or the exception's type and words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return work(), None
        except Exception as error:
            return None, error


def same(ours, theirs):
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            same(one, other)
    elif isinstance(theirs, torch.Tensor):
        assert type(ours) is type(theirs)
        assert ours.requires_grad == theirs.requires_grad
        if theirs.is_nested:
            same(list(ours.unbind()), list(theirs.unbind()))
            return
        assert ours.stride() == theirs.stride()
        tolerance = 2e-2 if theirs.dtype in (torch.bfloat16, torch.float16) else 1e-4
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert ours == theirs


def alike(work):
    """Runs a program with and without; returns what it saw."""
    theirs, wrong = outcome(work)
    with evosdpa.patch():
        ours, also_wrong = outcome(work)
    assert F.scaled_dot_product_attention is ORIGINAL
    if wrong is not None:
        assert also_wrong is not None, f"torch says {wrong!r}"
        assert type(also_wrong) is type(wrong), repr(also_wrong)
        assert str(also_wrong).split("\n")[0] == str(wrong).split("\n")[0]
    else:
        assert also_wrong is None, repr(also_wrong)
        same(ours, theirs)
    return theirs


@contextlib.contextmanager
def counted(monkeypatch):
    """How many calls evosdpa computes itself."""
    done = []
    for side, name in ((evosdpa._torch, "straight"), (evosdpa._native, "forward")):
        native = getattr(side, name)

        def counting(*given, native=native):
            answer = native(*given)
            done.append(answer is not None or native is not None)
            if native.__name__ == "straight" and answer is None:
                done.pop()
            return answer

        monkeypatch.setattr(side, name, counting)
    yield done
    monkeypatch.undo()
