"""PyTorch's own samples of ``scaled_dot_product_attention``, with and without ``evosdpa.patch()``."""

import sys
import types
import unittest

import pytest
import torch

import evosdpa
from test_torch_patch import ORIGINAL, outcome


def operators():
    """The entries of torch's table of operators. It is meant for torch's own tests, which have one package more."""
    missing = "expecttest" not in sys.modules
    if missing:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"this torch has no table of operators: {error}")
    finally:
        if missing:
            del sys.modules["expecttest"]
    found = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    assert found
    return found


def of(sample):
    return lambda op: op(sample.input, *sample.args, **sample.kwargs)


def test_samples():
    count = 0
    for op in operators():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for gradient in (False, True):
                for sample in op.sample_inputs("cpu", dtype, requires_grad=gradient):
                    compare(op, sample, gradient)
                    count += 1
    assert count > 100


def compare(op, sample, gradient):
    tensors = [x for x in (sample.input, *sample.args) if isinstance(x, torch.Tensor) and x.requires_grad]

    def run():
        out = of(sample)(op)
        return (out, *torch.autograd.grad(out.float().square().sum(), tensors)) if tensors else (out,)

    theirs, wrong = outcome(run)
    with evosdpa.patch():
        ours, also_wrong = outcome(run)
    assert torch.nn.functional.scaled_dot_product_attention is ORIGINAL
    compare_tensors(op, sample, ours, theirs, wrong, also_wrong)
    # patch() leaves small calls in float32 to torch.
    straight, wrong = outcome(lambda: evosdpa.sdpa(sample.input, *sample.args, **sample.kwargs, fallback=True))
    if wrong is None and theirs is not None and not sample.kwargs.get("dropout_p"):
        assert_near(straight, theirs[0], str(sample.kwargs))


def compare_tensors(op, sample, ours, theirs, wrong, also_wrong):
    where = f"{sample.input.dtype} {tuple(sample.input.shape)} {sample.kwargs}"
    assert type(wrong) is type(also_wrong) and str(wrong) == str(also_wrong), where
    if wrong is None:
        for one, other in zip(ours, theirs):
            assert one.stride() == other.stride() and one.requires_grad == other.requires_grad, where
            assert_near(one, other, where)


def assert_near(ours, theirs, where):
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(theirs.dtype, 2e-2)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda said: f"{where}: {said}")


def test_wrong_inputs():
    for op in operators():
        if op.error_inputs_func is None:
            continue
        for wrong in op.error_inputs("cpu"):
            compare(op, wrong.sample_input, False)
