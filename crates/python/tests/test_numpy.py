"""NumPy arrays, with or without torch installed."""

import os
import subprocess
import sys
import threading
import types

import numpy
import pytest

import evosdpa
import oracle

ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def drawn(family, shapes, dtype=numpy.float32, seed=0):
    largest = 1e30 if dtype == numpy.float32 else 16384.0
    return [x.astype(dtype) for x in oracle.inputs(family, shapes, seed, largest)]


def check(out, wanted, value_scale=1.0):
    assert oracle.worst(out, wanted, ROUNDING[out.dtype.name], value_scale) <= 1.0


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_families(family, causal, dtype):
    shapes = [(2, 4, 65, 40), (2, 2, 33, 40), (2, 2, 33, 40)]
    q, k, v = drawn(family, shapes, dtype)
    out = evosdpa.sdpa(q, k, v, is_causal=causal, enable_gqa=True)
    assert out.dtype == dtype and out.shape == (2, 4, 65, 40)
    wanted, _ = oracle.attention(q, k, v, right=0 if causal else -1)
    check(out, wanted, max(1.0, float(numpy.abs(v.astype(numpy.float64)).max())) if family == "max-values" else 1.0)


@pytest.mark.parametrize("queries,keys", [(1, 1), (64, 128), (239, 1), (113, 203), (3, 511)])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 7), (-1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_layout_masks_and_lse(queries, keys, window, causal):
    q, k, v = drawn("normal", [(2, queries, 4, 32), (2, keys, 2, 32), (2, keys, 2, 24)])
    out, lse = evosdpa.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
    left, right = window
    transposed = [x.swapaxes(1, 2) for x in (q, k, v)]
    wanted, wanted_lse = oracle.attention(*transposed, left=left, right=0 if causal else right, bottom_right=True)
    check(out, wanted.swapaxes(1, 2))
    assert out.flags.c_contiguous and lse.dtype == numpy.float32
    nobody = numpy.isinf(wanted_lse)
    assert (out.swapaxes(1, 2)[nobody] == 0).all()
    numpy.testing.assert_array_equal(lse[nobody], -numpy.inf)
    numpy.testing.assert_allclose(lse[~nobody], wanted_lse[~nobody], rtol=1e-5, atol=1e-4)


def test_precision(monkeypatch):
    q, k, v = drawn("normal", [(1, 4, 70, 40)] * 3, numpy.float16)
    asked = []
    straight = evosdpa._native.straight
    monkeypatch.setattr(evosdpa._native, "straight", lambda *arguments: asked.append(arguments[8]) or straight(*arguments))
    out = evosdpa.sdpa(q, k, v, precision="high")
    check(out, oracle.attention(q, k, v)[0])
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    numpy.testing.assert_array_equal(evosdpa.flash_attn_func(*swapped, precision="high").swapaxes(1, 2), out)
    evosdpa.sdpa(q, k, v, precision="default")
    assert asked == [True, True, False], "the library is told"
    with pytest.raises(ValueError, match="'highest'; use 'default' or 'high'"):
        evosdpa.sdpa(q, k, v, precision="highest")


def test_batch_invariant():
    """A sequence's bits do not depend on its neighbours; the word is the process's, and says what was before."""
    assert evosdpa.set_batch_invariant(True) is False
    try:
        q, k, v = drawn("normal", [(3, 1, 4, 40), (3, 5000, 2, 40), (3, 5000, 2, 40)])
        lengths = numpy.array([4500, 1, 2049], numpy.int32)
        out = evosdpa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        for i in range(3):
            alone = evosdpa.flash_attn_with_kvcache(*(x[i : i + 1] for x in (q, k, v)), cache_seqlens=lengths[i : i + 1])
            numpy.testing.assert_array_equal(alone[0], out[i])
    finally:
        assert evosdpa.set_batch_invariant(False) is True


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_caches_of_codes(kind):
    """With scales for each sequence and head, new tokens among them; without a scale it is one."""
    info = numpy.iinfo(kind)
    random = numpy.random.default_rng(3)
    k, v = (random.integers(info.min, info.max + 1, (2, 8, 2, 16)).astype(kind) for _ in "kv")
    new = random.integers(info.min, info.max + 1, (2, 1, 2, 16)).astype(kind)
    q = random.standard_normal((2, 1, 4, 16)).astype(numpy.float32)
    scales = {f"{name}_descale": (random.random((2, 2)) * 0.01 + 0.005).astype(numpy.float32) for name in "kv"}
    out = evosdpa.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=5, **scales)
    numpy.testing.assert_array_equal(k[:, 5], new[:, 0])
    values = (x.astype(numpy.float64) if kind == "int8" else (x - 128.0) * 448 / 127 for x in (k, v))
    scaled = [(x * scale[:, None, :, None])[:, :6].swapaxes(1, 2) for x, scale in zip(values, scales.values())]
    wanted = oracle.attention(q.swapaxes(1, 2).astype(numpy.float64), *scaled)[0].swapaxes(1, 2)
    numpy.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    alone = evosdpa.flash_attn_with_kvcache(q, k, v, cache_seqlens=1)
    first = v[:, :1].astype(numpy.float64) if kind == "int8" else (v[:, :1] - 128.0) * 448 / 127
    numpy.testing.assert_allclose(alone, first.repeat(2, 2), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="no kernel for int16"):
        evosdpa.flash_attn_with_kvcache(q, k.astype("int16"), v.astype("int16"), cache_seqlens=1)
    with pytest.raises(TypeError, match="q, k and v hold float32, .*convert them to one type"):
        evosdpa.flash_attn_with_kvcache(q, k, v.astype("float32"), cache_seqlens=1)


def test_lse_forms():
    q, *_ = drawn("normal", [(1, 5, 2, 8)] * 3)
    out, lse = evosdpa.flash_attn_func(q, q, q, return_attn_probs=True)
    assert lse.shape == (1, 2, 5)
    numpy.testing.assert_array_equal(out, evosdpa.flash_attn_func(q, q, q))


def test_scale():
    q, k, v = drawn("normal", [(1, 2, 9, 16)] * 3)
    for scale in (0.0, 0.5, 3.0):
        check(evosdpa.sdpa(q, k, v, scale=scale), oracle.attention(q, k, v, scale=scale)[0])
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            evosdpa.sdpa(q, k, v, scale=scale)


def test_strides_are_read_in_place():
    """Gaps hold NaN: one that is read shows."""
    rng = numpy.random.default_rng(1)
    big = numpy.full((3, 5, 20, 6, 24), numpy.nan, numpy.float32)
    big[1, ::2, 1:15, ::2, :16] = rng.standard_normal((3, 14, 3, 16))
    # As if batch × sequence × heads were cut from a larger block.
    x = big[1, ::2, 1:15, ::2, :16].transpose(0, 2, 1, 3)
    assert not x.flags.c_contiguous
    out = evosdpa.sdpa(x, x, x, is_causal=True)
    check(out, oracle.attention(x, x, x, right=0)[0])


def any_strides(x):
    """The same numbers, lying in memory in every way that NumPy has."""
    record = numpy.zeros(x.shape, [("number", x.dtype), ("odd", "u1")])
    record["number"] = x
    shifted = numpy.frombuffer(bytearray(b"." + x.tobytes()), x.dtype, offset=1).reshape(x.shape)
    return {
        "columns": x.swapaxes(2, 3).copy().swapaxes(2, 3),
        "backwards": numpy.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
        "every other": numpy.repeat(x, 2, axis=3)[..., ::2],
        "field of a record": record["number"],
        "unaligned": shifted,
        "Fortran": numpy.asfortranarray(x),
        "swapped": x.astype(x.dtype.newbyteorder()),
        "read only": numpy.broadcast_to(x, x.shape),
    }


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
def test_any_strides(dtype):
    q, k, v = drawn("normal", [(2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16)], dtype)
    wanted = evosdpa.sdpa(q, k, v, enable_gqa=True)
    flash = [x.swapaxes(1, 2) for x in (q, k, v)]
    ways = {name: [any_strides(x)[name] for x in (q, k, v)] for name in any_strides(q)}
    assert not ways["swapped"][0].dtype.isnative and not ways["unaligned"][0].flags.aligned
    for name, (q2, k2, v2) in ways.items():
        for given in [(q2, k2, v2), (q, k2, v), (q2, k, v2)]:
            out = evosdpa.sdpa(*given, enable_gqa=True)
            assert out.dtype == dtype, name
            numpy.testing.assert_array_equal(out, wanted, err_msg=name)
        out = evosdpa.flash_attn_func(flash[0], *(x.swapaxes(1, 2) for x in (k2, v2)))
        numpy.testing.assert_array_equal(out.swapaxes(1, 2), wanted, err_msg=name)
    one = evosdpa.sdpa(q[..., 3:4], k[..., 3:4], v[..., 3:4], enable_gqa=True)
    copied = [numpy.ascontiguousarray(x[..., 3:4]) for x in (q, k, v)]
    numpy.testing.assert_array_equal(one, evosdpa.sdpa(*copied, enable_gqa=True))


def test_arrays_that_mean_more_are_refused():
    q, k, v = drawn("normal", [(1, 2, 8, 16)] * 3)
    hidden = numpy.ma.masked_array(k, mask=k > 0)
    with pytest.raises(TypeError, match=r"k is a MaskedArray.*k.filled"):
        evosdpa.sdpa(q, hidden, v)

    class Metres(numpy.ndarray):
        pass

    with pytest.raises(TypeError, match="v is a Metres"):
        evosdpa.flash_attn_func(q, k, v.view(Metres))


def test_broadcast_batches_and_heads():
    q, k, v = drawn("normal", [(3, 4, 7, 8), (1, 1, 9, 8), (1, 1, 9, 8)])
    out = evosdpa.sdpa(q, k, v)
    spread = [numpy.broadcast_to(x, (3, 1, 9, 8)) for x in (k, v)]
    check(out, oracle.attention(q, *spread)[0])
    three = evosdpa.sdpa(q[0], k[0], v[0])
    numpy.testing.assert_array_equal(three, out[0])


def test_nobody_to_see():
    q, k = numpy.ones((1, 2, 3, 4), numpy.float32), numpy.ones((1, 2, 0, 4), numpy.float32)
    assert (evosdpa.sdpa(q, k, k) == 0).all()
    out, lse = evosdpa.flash_attn_func(q.swapaxes(1, 2), k.swapaxes(1, 2), k.swapaxes(1, 2), return_lse=True)
    assert (out == 0).all() and (lse == -numpy.inf).all()
    assert evosdpa.sdpa(q[:0], k[:0], k[:0]).shape == (0, 2, 3, 4)


def test_packed_sequences_without_keys():
    """NumPy gives arrays without elements strides of 0."""
    q, k = numpy.ones((10, 4, 16), numpy.float32), numpy.zeros((0, 2, 16), numpy.float32)
    places = numpy.array([0, 3, 10], numpy.int32)
    out, lse = evosdpa.flash_attn_varlen_func(q, k, k, places, 0 * places, 7, 0, return_softmax_lse=True)
    assert (out == 0).all() and (lse == -numpy.inf).all()


def test_sinks_without_keys():
    q, k, sinks = numpy.ones((2, 5, 4, 16), numpy.float32), numpy.ones((2, 0, 2, 16), numpy.float32), numpy.arange(4, dtype=numpy.float32)
    out, lse = evosdpa.flash_attn_func(q, k, k, s_aux=sinks, return_lse=True)
    assert (out == 0).all() and (lse == sinks[None, :, None]).all()


def test_errors_say_what_is_wrong():
    q, k, v = drawn("normal", [(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)])
    with pytest.raises(ValueError, match="enable_gqa=True"):
        evosdpa.sdpa(q, k, v)
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        evosdpa.sdpa(q, k.repeat(3, 1)[:, :3], v.repeat(3, 1)[:, :3], enable_gqa=True)
    with pytest.raises(ValueError, match=r"K has shape \[1, 2, 8, 8\], but the problem needs \[1, 2, 8, 16\]"):
        evosdpa.sdpa(q, k[..., :8], v, enable_gqa=True)
    with pytest.raises(ValueError, match="dimensions"):
        evosdpa.sdpa(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(TypeError, match="float32, float16 and float32"):
        evosdpa.sdpa(q, k.astype(numpy.float16), v, enable_gqa=True)
    with pytest.raises(TypeError, match="list"):
        evosdpa.sdpa([1.0], k, v)
    with pytest.raises(ValueError, match="window_size"):
        evosdpa.flash_attn_func(q, q, q, window_size=(-2, 0))
    with pytest.raises(TypeError):
        evosdpa.flash_attn_func(q, q, q, 0.0)  # FlashAttention's versions disagree on what the fourth is


def test_unsupported_names_what_to_use():
    q, *_ = drawn("normal", [(1, 2, 8, 16)] * 3)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.5"):
        evosdpa.sdpa(q, q, q, dropout_p=0.5)
    for arguments in [{"qv": q}, {"alibi_slopes": numpy.ones((2, 2), numpy.float32)}, {"dropout_p": 0.1}]:
        with pytest.raises(NotImplementedError, match=next(iter(arguments))):
            evosdpa.flash_attn_func(q, q, q, **arguments)
    with pytest.raises(NotImplementedError, match="float64"):
        evosdpa.sdpa(q.astype(float), q.astype(float), q.astype(float))
    with pytest.raises(ValueError, match="both"):
        evosdpa.sdpa(q, q, q, attn_mask=numpy.ones((8, 8), bool), is_causal=True)


def test_dense_masks():
    """Each shape that spreads, each way to lie in memory, against the same mask written out."""
    q, k, v = drawn("normal", [(2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)])
    numbers = numpy.random.default_rng(3).standard_normal((2, 4, 5, 7)).astype(numpy.float32)
    scores = numpy.einsum("bhqd,bhkd->bhqk", q, k) / 4
    given = [numbers, numbers[:1], numbers[0], numbers[0, 0], numbers[:, :, :1], numbers[0, 0, 0], numbers[..., :1]]
    given += [numbers[..., ::-1], numpy.asfortranarray(numbers), numbers.astype(">f4"), any_strides(numbers)["unaligned"]]
    given += [numpy.broadcast_to(numbers[:1, :1], (2, 4, 5, 7)), numpy.array(0.5, numpy.float32)]
    for mask in given:
        for is_boolean in (False, True):
            used = mask > -0.5 if is_boolean else mask
            added = numpy.where(used, 0.0, -numpy.inf) if is_boolean else used
            weights = numpy.exp(scores + added)
            total = weights.sum(-1, keepdims=True)
            wanted = numpy.divide(weights, total, out=numpy.zeros_like(weights), where=total > 0) @ v
            numpy.testing.assert_allclose(evosdpa.sdpa(q, k, v, used), wanted, rtol=2e-5, atol=2e-5)
            if used.ndim < 4:
                out = evosdpa.sdpa(q[0], k[0], v[0], used)
                assert out.shape == (4, 5, 16)
    half = [x.astype(numpy.float16) for x in (q, k, v)]
    for mask in (numbers, numbers.astype(numpy.float16)):
        numpy.testing.assert_allclose(evosdpa.sdpa(*half, mask), evosdpa.sdpa(q, k, v, numbers), rtol=2e-2, atol=2e-2)
    for mask, kind, words in [
        (numbers.astype(float), TypeError, "float64"),
        (numbers.astype(numpy.float16), TypeError, "float16"),
        (numbers[..., :3], ValueError, r"\[2, 4, 5, 3\]"),
        (numbers[None], ValueError, r"\[1, 2, 4, 5, 7\]"),
        (numbers.tolist(), TypeError, "attn_mask is a list"),
        (numpy.ma.masked_array(numbers), TypeError, "attn_mask is a MaskedArray"),
    ]:
        with pytest.raises(kind, match=words):
            evosdpa.sdpa(q, k, v, mask)


def test_bfloat16_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = drawn("normal", [(1, 2, 33, 32)] * 3, ml_dtypes.bfloat16)
    out = evosdpa.sdpa(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    check(out, oracle.attention(q, k, v)[0])


def test_a_foreign_object_by_dlpack():
    class Foreign:
        """A library of its own whose tensors are known by DLPack alone."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    class Plain:
        """One that is known as an array."""

        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    q, k, v = drawn("normal", [(1, 2, 9, 8)] * 3)
    mask = numpy.tri(9, dtype=bool)
    for kind in (Foreign, Plain):
        out = evosdpa.sdpa(*map(kind, (q, k, v)))
        numpy.testing.assert_array_equal(numpy.asarray(out), evosdpa.sdpa(q, k, v))
        mixed = evosdpa.sdpa(q, kind(k), v, kind(mask))
        assert type(mixed) is numpy.ndarray
        numpy.testing.assert_array_equal(mixed, evosdpa.sdpa(q, k, v, mask))

    class Broken(Foreign):
        def __dlpack__(self, **arguments):
            raise BufferError("lies elsewhere")

    with pytest.raises(NotImplementedError, match="k, a .*Broken.*lies elsewhere"):
        evosdpa.sdpa(q, Broken(k), v)

    for wrong in (q.tolist(), None, "q"):
        with pytest.raises(TypeError, match="v is a "):
            evosdpa.flash_attn_func(q, k, wrong)
    # A cache that is known by a copy alone would not hold what is written into the copy.
    cache, new = numpy.zeros((1, 4, 1, 8), numpy.float32), numpy.ones((1, 1, 1, 8), numpy.float32)
    held = numpy.array([2], numpy.int32)
    with pytest.raises(TypeError, match="v_cache is a Plain.*in place"):
        evosdpa.flash_attn_with_kvcache(Foreign(new), Foreign(cache), Plain(cache), new, new, cache_seqlens=held)
    evosdpa.flash_attn_with_kvcache(Foreign(new), Foreign(cache), Foreign(cache), new, new, cache_seqlens=held)
    assert cache[0, 2].all() and not cache[0, 3].any()


def test_a_library_gets_its_own_arrays_back(monkeypatch):
    """As CuPy's would: by the library's ``from_dlpack``, for every result."""

    class ndarray:
        def __init__(self, memory):
            self.memory = memory

        def __dlpack__(self, **arguments):
            return self.memory.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.memory.__dlpack_device__()

    library = types.ModuleType("looks_like_cupy")
    library.from_dlpack = lambda array: ndarray(numpy.from_dlpack(array))
    ndarray.__module__ = "looks_like_cupy._core.core"
    monkeypatch.setitem(sys.modules, "looks_like_cupy", library)
    q, k, v = drawn("normal", [(2, 9, 2, 8)] * 3)
    starts = numpy.array([0, 4, 9], numpy.int32)
    for function, given, named in [
        (evosdpa.sdpa, (q, k, v), {"is_causal": True}),
        (evosdpa.flash_attn_func, (q, k, v), {"return_lse": True, "softcap": 3.0}),
        (evosdpa.flash_attn_varlen_func, (q[0], k[0], v[0], starts, starts), {"return_softmax_lse": True}),
    ]:
        ours = function(*map(ndarray, given), **named)
        plain = function(*given, **named)
        for one, other in zip(ours, plain) if isinstance(plain, tuple) else [(ours, plain)]:
            assert type(one) is ndarray
            numpy.testing.assert_array_equal(one.memory, other)


def test_threads_and_the_interpreter_lock():
    """Eight threads at once get what one gets; the interpreter runs on meanwhile."""
    q, k, v = drawn("normal", [(1, 8, 256, 64)] * 3)
    wanted = evosdpa.sdpa(q, k, v)
    wrong, ticks = [], [0]
    done = threading.Event()

    def work():
        for _ in range(6):
            if not numpy.array_equal(evosdpa.sdpa(q, k, v), wanted):
                wrong.append("differs")

    def tick():
        while not done.wait(0.0005):
            ticks[0] += 1

    watcher = threading.Thread(target=tick)
    workers = [threading.Thread(target=work) for _ in range(8)]
    watcher.start()
    [thread.start() for thread in workers]
    [thread.join() for thread in workers]
    done.set()
    watcher.join()
    assert not wrong and ticks[0] > 3


def test_after_a_fork():
    q, k, v = drawn("normal", [(1, 8, 256, 64)] * 3)
    wanted = evosdpa.sdpa(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if numpy.array_equal(evosdpa.sdpa(q, k, v), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_importing_is_quiet_about_torch():
    code = "import sys, evosdpa; assert 'torch' not in sys.modules; import numpy; x = numpy.ones((1,1,2,8), 'f4'); print(evosdpa.sdpa(x,x,x).sum())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "EVOSDPA_TORCH": "0"}, capture_output=True, text=True)
    assert done.stdout.strip() == "16.0", done.stderr


def test_arrays_of_a_gpu_that_is_not_there():
    """As CuPy's and Numba's look on a machine without a GPU: said to be elsewhere, never read."""

    class Numba:
        shape = (1, 2, 9, 8)
        __cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}

    class CuPy(Numba):
        def __dlpack__(self, **arguments):
            raise RuntimeError("no driver")

        def __dlpack_device__(self):
            return 2, 0

        def __array__(self, *arguments, **named):
            raise TypeError("use .get()")

    q, k, v = drawn("normal", [(1, 2, 9, 8)] * 3)
    for kind in (Numba, CuPy):
        for function in (evosdpa.sdpa, evosdpa.flash_attn_func):
            with pytest.raises(NotImplementedError, match=f"q, a .*{kind.__name__}"):
                function(kind(), kind(), kind())
            with pytest.raises(NotImplementedError, match=f"v, a .*{kind.__name__}"):
                function(q, k, kind())
        with pytest.raises(NotImplementedError, match=f"attn_mask, a .*{kind.__name__}"):
            evosdpa.sdpa(q, k, v, kind())


def test_leaving_with_threads_at_work():
    """Daemon threads that are computing when the interpreter ends do not take the process down."""
    code = """
import sys, threading, time, numpy, evosdpa
x = numpy.ones((1, 8, 256, 64), numpy.float32)
def work():
    while True:
        evosdpa.sdpa(x, x, x)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
sys.exit(7)
"""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "EVOSDPA_TORCH": "0"})
        assert done.returncode == 7, done.stderr
