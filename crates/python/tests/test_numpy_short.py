"""NumPy's plain arrays take one native call, with the bits and the memory of the long way."""

import numpy
import pytest

import evosdpa
from evosdpa import _native


@pytest.fixture
def ways(monkeypatch):
    """Runs a call by both ways, asks for the same result, and says whether the short one took it."""
    short = _native.straight

    def run(call):
        taken = []

        def watched(*given):
            taken.append(short(*given))
            return taken[-1]

        # With torch installed its tensors are asked about first.
        results = []
        for way in (watched, lambda *given: None):
            monkeypatch.setattr(_native, "straight", way)
            out = call()
            results.append(out if isinstance(out, tuple) else (out,))
        for ours, theirs in zip(*results, strict=True):
            assert type(ours) is numpy.ndarray and ours.dtype == theirs.dtype
            assert numpy.array_equal(ours, theirs) and ours.strides == theirs.strides
        return taken != [] and taken[-1] is not None

    return run


def drawn(*shape, dtype=numpy.float32, seed=5):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
def test_plain_arrays(ways, dtype):
    q, k, v = drawn(2, 4, 5, 16, dtype=dtype), drawn(2, 2, 7, 16, dtype=dtype), drawn(2, 2, 7, 24, dtype=dtype)
    k_own, v_own = k.repeat(2, 1), v.repeat(2, 1)
    by_token = tuple(x.swapaxes(1, 2) for x in (drawn(2, 5, 4, 16, dtype=dtype), k, v))
    for tensors in ((q, k_own, v_own), (by_token[0], k_own, v_own), (drawn(2, 4, 9, 20, dtype=dtype)[:, :, 1:6, 2:18], k_own, v_own)):
        for named in ({}, {"is_causal": True}, {"scale": 0.3}, {"precision": "high"}):
            assert ways(lambda: evosdpa.sdpa(*tensors, **named)), named
    assert ways(lambda: evosdpa.sdpa(q, k, v, enable_gqa=True))
    frozen = q.copy()
    frozen.flags.writeable = False
    assert ways(lambda: evosdpa.sdpa(frozen, k_own, v_own))
    bias = drawn(2, 4, 5, 7)
    for mask in (bias, bias > 0, bias[0, 0], bias[:1, :, :1] > 0, numpy.broadcast_to(bias[:, :1], bias.shape), bias.astype(dtype)):
        assert ways(lambda: evosdpa.sdpa(q, k_own, v_own, mask)), mask.shape
    flash = tuple(x.swapaxes(1, 2) for x in (q, k, v)), tuple(numpy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    for tensors in flash:
        for named in ({}, {"causal": True}, {"return_lse": True}, {"window_size": (2, 1)}, {"softcap": 2.0, "s_aux": drawn(4)}):
            if "softcap" in named or tensors is flash[1]:
                assert ways(lambda: evosdpa.flash_attn_func(*tensors, **named)), named


def test_arrays_out_of_the_ordinary_take_the_long_way(ways):
    q, k, v = drawn(1, 2, 5, 16), drawn(1, 2, 7, 16), drawn(1, 2, 7, 16)
    backwards, gaps = q[:, :, ::-1], drawn(1, 2, 5, 32)[..., ::2]
    unaligned = numpy.frombuffer(b"\0" + q.tobytes(), numpy.uint8)[1:].view(numpy.float32).reshape(q.shape)
    for other in (q[0], backwards, gaps, unaligned, q.astype(q.dtype.newbyteorder()), q[:, :, :0]):
        three = (k[0], v[0]) if other.ndim == 3 else (k, v)
        assert not ways(lambda: evosdpa.sdpa(other, *three)), (other.shape, other.strides)
    assert not ways(lambda: evosdpa.sdpa(q, k[:, :1], v[:, :1]))
    with pytest.raises(ValueError):
        evosdpa.sdpa(q, k[..., :8], v)
    with pytest.raises(TypeError):
        evosdpa.sdpa(q, k.astype(numpy.float16), v)
    with pytest.raises(TypeError, match="subclass|MaskedArray"):
        evosdpa.sdpa(numpy.ma.masked_array(q), k, v)
