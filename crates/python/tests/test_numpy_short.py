"""NumPy's plain arrays take one native call, with the bits and the memory of the long way."""

import numpy
import pytest

import evosdpa
from evosdpa import _native


@pytest.fixture
def ways(monkeypatch):
    """Runs a call by both ways, asks for the same result, and says whether the short one took it."""
    short = {name: getattr(_native, name) for name in ("straight", "straight_cache")}

    def run(call):
        taken = []

        def watched(function):
            def straight(*given):
                taken.append(function(*given))
                return taken[-1]

            return straight

        # With torch installed its tensors are asked about first.
        results = []
        for way in (watched, lambda function: lambda *given: None):
            for name, function in short.items():
                monkeypatch.setattr(_native, name, way(function))
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


def cumulative(lengths):
    return numpy.cumsum([0, *lengths]).astype(numpy.int32)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
def test_packed_arrays(ways, dtype):
    q, k, v = drawn(9, 4, 16, dtype=dtype), drawn(9, 2, 16, dtype=dtype), drawn(9, 2, 24, dtype=dtype)
    cu, ints = cumulative([5, 0, 4]), numpy.int32
    used = {"seqused_q": numpy.array([4, 0, 3], ints), "seqused_k": numpy.array([2, 0, 3], ints)}
    changed = {"softcap": 2.0, "s_aux": drawn(4), "alibi_slopes": drawn(4) ** 2, "attention_chunk": 3}
    for named in ({}, {"causal": True, "softmax_scale": 0.5}, {"return_lse": True, "precision": "high"}, used, changed):
        assert ways(lambda: evosdpa.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, **named)), named.keys()
    by_head = drawn(4, 9, 16, dtype=dtype).swapaxes(0, 1)
    for other in (by_head, drawn(9, 8, 16, dtype=dtype)[:, 2:6], numpy.broadcast_to(q[:1], q.shape)):
        assert ways(lambda: evosdpa.flash_attn_varlen_func(other, k, v, cu, cu, 5, 5)), other.strides
    for other in (q[..., ::-1], q[::-1], drawn(9, 4, 32, dtype=dtype)[..., ::2], q[:0]):
        lists = (cu, cu, 5, 5) if len(other) else (0 * cu, cu, 5, 5)
        assert not ways(lambda: evosdpa.flash_attn_varlen_func(other, k, v, *lists)), other.strides
    blocks = drawn(3, 6, 2, 16, dtype=dtype), drawn(3, 6, 2, 24, dtype=dtype)
    assert not ways(lambda: evosdpa.flash_attn_varlen_func(q, *blocks, cu, max_seqlen_q=5, seqused_k=numpy.array([6, 0, 2], ints)))


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
def test_caches_of_arrays(ways, dtype):
    ints = numpy.int32
    held, padding, rows = (numpy.array(numbers, ints) for numbers in ([5, 0], [2, 0], [1, 0]))
    cache = drawn(2, 16, 2, 16, dtype=dtype), drawn(2, 16, 2, 24, dtype=dtype)
    pages = drawn(9, 4, 2, 16, dtype=dtype), drawn(9, 4, 2, 24, dtype=dtype)
    table = numpy.array([[8, 1, 2, 5], [0, 7, 3, 4]], ints)
    new = drawn(2, 3, 2, 16, dtype=dtype), drawn(2, 3, 2, 24, dtype=dtype)
    joined = drawn(4, 2, 16, dtype=dtype), drawn(4, 2, 24, dtype=dtype)
    q, tokens = drawn(2, 3, 4, 16, dtype=dtype), drawn(6, 4, 16, dtype=dtype)
    turn = {"rotary_cos": drawn(40, 4), "rotary_sin": drawn(40, 4)}
    by_pages = {"cache_seqlens": held, "page_table": table}
    cases = [
        (q, cache, None, {}),
        (q, cache, None, {"cache_seqlens": 7, "softcap": 3.0}),
        (q, cache, None, {"cache_seqlens": held, "cache_leftpad": padding, "cache_batch_idx": rows, "return_softmax_lse": True}),
        (q, cache, new, {"cache_seqlens": 4, "causal": True}),
        (q, cache, new, {"cache_seqlens": held, "causal": True, **turn}),
        (q, cache, new, {"cache_seqlens": held, **turn, "rotary_interleaved": False, "rotary_seqlens": padding}),
        (q, pages, new, {**by_pages, "cache_batch_idx": rows, "window_size": (4, 1)}),
        (q, pages, joined, {**by_pages, "cu_seqlens_k_new": cumulative([1, 3]), **turn}),
        (tokens, pages, new, {**by_pages, "cu_seqlens_q": cumulative([4, 1]), "max_seqlen_q": 4, "causal": True, **turn}),
    ]
    for queries, caches, added, named in cases:

        def call():
            k_cache, v_cache = (x.copy() for x in caches)
            out = evosdpa.flash_attn_with_kvcache(queries, k_cache, v_cache, *(added or ()), **named)
            return (*(out if isinstance(out, tuple) else (out,)), k_cache, v_cache)

        assert ways(call), named.keys()
    codes = tuple((x * 20).astype(numpy.int8) for x in cache)
    scales = {"k_descale": drawn(2, 2) ** 2, "v_descale": drawn(2, 2) ** 2}
    # Over codes queries of 16 bits alone are ordinary.
    assert ways(lambda: evosdpa.flash_attn_with_kvcache(q, *codes, cache_seqlens=held, **scales)) == (dtype == numpy.float16)


def test_what_is_refused_of_caches_is_refused_before_anything_is_written():
    ints = numpy.int32
    q, new = drawn(2, 1, 4, 16), drawn(2, 1, 2, 16)
    angles = {"rotary_cos": drawn(6, 8), "rotary_sin": drawn(6, 8)}
    good = {"cache_seqlens": numpy.array([3, 6], ints), "page_table": numpy.array([[0, 1], [2, 3]], ints)}
    cases = [
        ("at 8|page 8", {"page_table": numpy.array([[0, 1], [2, 8]], ints)}),
        ("sequence 1 holds 8 tokens .* room for 8", {"cache_seqlens": numpy.array([3, 8], ints)}),
        ("position 6", angles),
        ("shape", {"cache_seqlens": numpy.array([3], ints)}),
        ("int32", {"cache_seqlens": numpy.array([3, 6])}),
        ("cache_seqlens is -1", {"cache_seqlens": -1}),
    ]
    for said, change in cases:
        pages = drawn(8, 4, 2, 16), drawn(8, 4, 2, 16)
        before = [x.copy() for x in pages]
        with pytest.raises((TypeError, ValueError), match=said):
            evosdpa.flash_attn_with_kvcache(q, *pages, new, new, **{**good, **change})
        assert all(map(numpy.array_equal, pages, before)), said
    for place in (0, 1):
        pages = drawn(8, 4, 2, 16), drawn(8, 4, 2, 16)
        pages[place].setflags(write=False)
        evosdpa.flash_attn_with_kvcache(q, *pages, **good)
        with pytest.raises(ValueError, match="read-only"):
            evosdpa.flash_attn_with_kvcache(q, *pages, new, new, **good)
