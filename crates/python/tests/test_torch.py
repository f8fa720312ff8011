"""Torch tensors on a CPU: values, layouts, refusals, and the operator."""

import threading

import numpy
import pytest
import torch
import torch.nn.functional as F

import evosdpa
import oracle

ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(family, shapes, dtype=torch.float32, seed=0):
    largest = 16384.0 if dtype == torch.float16 else 1e30
    return [torch.from_numpy(x).to(dtype) for x in oracle.inputs(family, shapes, seed, largest)]


def check(out, wanted, value_scale=1.0):
    assert oracle.worst(out.double().numpy(), wanted, ROUNDING[out.dtype], value_scale) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_families_against_the_oracle_and_torch(family, causal, dtype):
    shapes = [(2, 4, 63, 64), (2, 2, 65, 64), (2, 2, 65, 64)]
    q, k, v = drawn(family, shapes, dtype)
    out = evosdpa.sdpa(q, k, v, is_causal=causal, enable_gqa=True)
    assert (out.dtype, out.shape, out.device) == (dtype, q.shape, q.device)
    wanted, _ = oracle.attention(*(x.double().numpy() for x in (q, k, v)), right=0 if causal else -1)
    value_scale = v.double().abs().max().item() if family == "max-values" else 1.0
    check(out, wanted, value_scale)
    # Torch's own answer is as near as its own rounding of the scores and weights allows.
    theirs = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal, enable_gqa=True)
    if family != "max-values":
        torch.testing.assert_close(out.float(), theirs, rtol=ROUNDING[dtype] * 2, atol=2e-3)


@pytest.mark.parametrize("dim,dim_v", [(32, 32), (40, 40), (80, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("queries,keys", [(1, 513), (33, 33), (65, 3)])
def test_shapes(queries, keys, dim, dim_v):
    q, k, v = drawn("normal", [(1, 4, queries, dim), (1, 2, keys, dim), (1, 2, keys, dim_v)], torch.bfloat16)
    out, lse = evosdpa.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, return_lse=True)
    wanted, wanted_lse = oracle.attention(*(x.double().numpy() for x in (q, k, v)), right=0, bottom_right=True)
    check(out.transpose(1, 2), wanted)
    torch.testing.assert_close(lse.double(), torch.from_numpy(wanted_lse), rtol=1e-5, atol=1e-4)


def test_the_output_lies_as_the_queries_do():
    packed = torch.randn(2, 9, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = evosdpa.sdpa(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    assert evosdpa.sdpa(q.contiguous(), k, v).is_contiguous()


def test_gaps_and_expanded_tensors():
    block = torch.full((2, 4, 20, 24), torch.nan)
    block[:, ::2, 3:13, :16] = torch.randn(2, 2, 10, 16)
    x = block[:, ::2, 3:13, :16]
    shared = x[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(evosdpa.sdpa(x, shared, x), F.scaled_dot_product_attention(x, shared, x))


def test_broadcast_as_torch_does():
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    torch.testing.assert_close(evosdpa.sdpa(q, k, v), F.scaled_dot_product_attention(q, k.expand(3, 4, 6, 8), v.expand(3, 4, 6, 8)))
    three = evosdpa.sdpa(q[0], q[0], q[0])
    torch.testing.assert_close(three, F.scaled_dot_product_attention(q[0], q[0], q[0]))


def test_refusals_and_the_fallback():
    q = torch.randn(1, 2, 8, 16)
    cases = [
        ((q, q, q), {"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "torch.no_grad"),
        ((q.double(),) * 3, {}, "torch.float64"),
        ((q.clone().requires_grad_(),) * 3, {}, "torch.no_grad"),
        ((torch.randn(2, 1, 2, 8, 16),) * 3, {}, "5 dimensions"),
        ((q.to("meta"),) * 3, {}, "device meta"),
    ]
    for tensors, arguments, words in cases:
        with pytest.raises(NotImplementedError, match=words):
            evosdpa.sdpa(*tensors, **arguments)
        theirs = F.scaled_dot_product_attention(*tensors, **arguments)
        ours = evosdpa.sdpa(*tensors, **arguments, fallback=True)
        assert ours.requires_grad == theirs.requires_grad
        if ours.device.type != "meta":
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.25"):
        evosdpa.sdpa(q, q, q, dropout_p=0.25)
    assert evosdpa.sdpa(q, q, q, dropout_p=0.25, fallback=True).shape == q.shape
    backwards = q.transpose(2, 3).contiguous().transpose(2, 3)
    wanted = F.scaled_dot_product_attention(q, q, q)
    for fallback in (True, False):  # what does not lie row by row is copied
        torch.testing.assert_close(evosdpa.sdpa(backwards, q, backwards, fallback=fallback), wanted)
        column = torch.randn(1, 2, 5, 2)[..., ::2]
        torch.testing.assert_close(evosdpa.sdpa(column, column, column, fallback=fallback), F.scaled_dot_product_attention(column, column, column))
        with pytest.raises(TypeError, match="attn_mask"):
            evosdpa.sdpa(q.double(), q.double(), q.double(), [True], fallback=True)
    with pytest.raises(TypeError, match=r"a scale or softcap is a tensor of shape \[2\]; give one number"):
        evosdpa.sdpa(q, q, q, scale=torch.ones(2))
    codes = torch.zeros(1, 3, 2, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="number of key/value heads is 0"):
        evosdpa.flash_attn_func(codes, codes[:, :, :0], codes[:, :, :0])
    with torch.no_grad():
        evosdpa.sdpa(*(q.clone().requires_grad_(),) * 3)


def test_flash_fallback_matches_the_kernels():
    q, k, v = torch.randn(2, 33, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    for arguments in [{}, {"causal": True}, {"window_size": (4, 2)}, {"softmax_scale": 0.3}]:
        ours, lse = evosdpa.flash_attn_func(q, k, v, **arguments, return_lse=True)
        learning = q.clone().requires_grad_()
        theirs, theirs_lse = evosdpa.flash_attn_func(learning, k, v, **arguments, return_lse=True, fallback=True)
        assert theirs.requires_grad
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, theirs_lse.detach(), rtol=1e-4, atol=1e-5)
        theirs.sum().backward()
    assert torch.isfinite(learning.grad).all()
    capped = evosdpa.flash_attn_func(q, k, v, softcap=0.5, fallback=True)
    assert not torch.allclose(capped, evosdpa.flash_attn_func(q, k, v), atol=1e-4)
    sloped = evosdpa.flash_attn_func(q, k, v, alibi_slopes=torch.rand(4), fallback=True)
    assert not torch.allclose(sloped, evosdpa.flash_attn_func(q, k, v), atol=1e-4)


def test_mixed_inputs():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="torch.float16"):
        evosdpa.sdpa(q, q.half(), q)
    with pytest.raises(ValueError, match="2 query heads"):
        evosdpa.sdpa(q, q.repeat(1, 3, 1, 1), q.repeat(1, 3, 1, 1))


def test_what_mixes_and_what_does_not():
    q = torch.randn(2, 4, 33, 16)
    seen = torch.ones(33, 33, dtype=torch.bool).tril()
    wanted = evosdpa.sdpa(q, q, q, seen)
    assert torch.equal(evosdpa.sdpa(q, q, q, seen.numpy()), wanted)
    assert (evosdpa.sdpa(q.numpy(), q.numpy(), q.numpy(), seen) == wanted.numpy()).all()
    hidden = numpy.ma.masked_array(q.numpy())
    for given in ((hidden, q, q), (q, q, hidden), (q, q, q, numpy.ma.masked_array(seen.numpy()))):
        with pytest.raises(TypeError, match="is a MaskedArray"):
            evosdpa.sdpa(*given)
    packed, numbers, starts = q[0].transpose(0, 1), numpy.ones(4, numpy.float32), torch.tensor([0, 5, 33], dtype=torch.int32)
    flash, varlen = evosdpa.flash_attn_func, evosdpa.flash_attn_varlen_func
    for name, call in [
        ("s_aux", lambda: flash(packed[None], packed[None], packed[None], s_aux=numbers)),
        ("alibi_slopes", lambda: flash(packed[None], packed[None], packed[None], alibi_slopes=[1.0] * 4)),
        ("cu_seqlens_q", lambda: varlen(packed, packed, packed, starts.numpy(), starts.numpy(), 28, 28)),
        ("cu_seqlens_q", lambda: varlen(*(packed.numpy(),) * 3, starts, starts, 28, 28)),
        ("cu_seqlens_q", lambda: varlen(packed, packed, packed, [0, 5, 33], starts, 28, 28)),
    ]:
        with pytest.raises(TypeError, match=f"{name} is a .*as q is"):
            call()


def test_no_gradient_is_lost():
    """Whatever a result depends on, and whichever way somebody differentiates: refused, or torch's by ``fallback``."""
    x, held = torch.randn(1, 9, 4, 16), torch.tensor([3], dtype=torch.int32)
    packed, starts = x[0], torch.tensor([0, 9], dtype=torch.int32)
    slopes, number = torch.randn(4, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    angles = torch.ones(16, 8, requires_grad=True)
    flash, varlen, cached = evosdpa.flash_attn_func, evosdpa.flash_attn_varlen_func, evosdpa.flash_attn_with_kvcache
    one = x[:, :1]
    calls = [
        lambda: flash(x, x, x, s_aux=slopes),
        lambda: flash(x, x, x, alibi_slopes=slopes),
        lambda: flash(x, x, x, softcap=number),
        lambda: varlen(packed, packed, packed, starts, starts, 9, 9, s_aux=slopes),
        lambda: varlen(packed, packed, packed, starts, starts, 9, 9, softmax_scale=number),
        lambda: cached(one, x, x, cache_seqlens=held, softmax_scale=number),
        lambda: cached(one, x.clone(), x.clone(), one, one, cache_seqlens=held, rotary_cos=angles, rotary_sin=angles),
        lambda: torch.func.jvp(lambda x: flash(x, x, x, softcap=2.0), (x,), (x,)),
        lambda: torch.func.jvp(lambda x: varlen(x, x, x, starts, starts, 9, 9), (packed,), (packed,)),
        lambda: torch.func.jvp(lambda s: flash(x, x, x, s_aux=s), (slopes.detach(),), (slopes.detach(),)),
        lambda: torch.func.jvp(lambda x: cached(one, x, x), (x,), (x,)),
    ]
    for place, call in enumerate(calls):
        with pytest.raises((NotImplementedError, TypeError), match="requires grad"):
            raise AssertionError(f"{place}: {call()}")
    flash(x, x, x, s_aux=slopes, fallback=True).sum().backward()
    assert slopes.grad.abs().sum() > 0
    with torch.no_grad():
        assert not flash(x, x, x, s_aux=slopes).requires_grad


@pytest.mark.parametrize("of", ["queries", "keys", "values"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_along_any_dimension(of, dim):
    place = ("queries", "keys", "values").index(of)
    whole = [torch.randn(2, 4, 9, 16) for _ in range(3)]
    many = torch.randn(3, 2, 4, 9, 16).movedim(0, dim).contiguous()
    batched = [many if i == place else x for i, x in enumerate(whole)]
    out = torch.vmap(evosdpa.sdpa, in_dims=tuple(dim if i == place else None for i in range(3)))(*batched)
    for i in range(3):
        alone = [many.select(dim, i).contiguous() if j == place else x for j, x in enumerate(whole)]
        torch.testing.assert_close(out[i], evosdpa.sdpa(*alone))


def test_vmap_of_a_mask_is_refused_by_name():
    x, masks = torch.randn(3, 2, 4, 9, 16), torch.ones(3, 9, 9, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="torch.vmap of a call with mask"):
        torch.vmap(lambda x, mask: evosdpa.sdpa(x, x, x, mask))(x, masks)


def test_a_gpus_array_that_has_a_stream_is_waited_for(monkeypatch):
    """CUDA's array interface, version 3: what its owner queued on that stream may not have run."""
    q, waited = torch.randn(1, 2, 9, 8), []

    class Array:
        def __init__(self, stream):
            self.__cuda_array_interface__ = {"shape": q.shape, "typestr": "<f4", "data": (4096, False), "version": 3, "stream": stream}

    monkeypatch.setattr(torch, "as_tensor", lambda given: q)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    wanted = evosdpa.sdpa(q, q, q)
    assert torch.equal(evosdpa.sdpa(Array(None), q, q), wanted) and not waited
    assert torch.equal(evosdpa.sdpa(q, Array(1), Array(7)), wanted) and len(waited) == 2


def test_a_thousand_calls_from_eight_threads():
    q, k, v = (torch.randn(1, 4, 64, 32) for _ in range(3))
    wanted = evosdpa.sdpa(q, k, v)
    wrong = []

    def work():
        for _ in range(125):
            if not torch.equal(evosdpa.sdpa(q, k, v), wanted):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_both_ways_to_the_kernels_are_the_same(monkeypatch):
    """Tensors are described by one C call, or by their attributes after all questions have been asked (older torch)."""
    if not evosdpa._torch._EXCHANGED:
        pytest.skip("this torch has no exchange interface")
    q, k, v = (torch.randn(2, 9, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    flash = [x.transpose(1, 2) for x in (q, k, v)]

    def answers():
        both = evosdpa.flash_attn_func(*flash, causal=True, return_lse=True)
        return [evosdpa.sdpa(q, k, v, enable_gqa=True), evosdpa.sdpa(*(x.contiguous() for x in (q, q, q))), *both]

    wanted = answers()
    monkeypatch.setattr(evosdpa._torch, "straight", lambda *given: None)
    for ours, theirs in zip(answers(), wanted):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    torch.testing.assert_close(wanted[0], F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_precision(monkeypatch):
    q, k, v = (torch.randn(1, 4, 70, 40, dtype=torch.bfloat16) for _ in range(3))
    asked = []
    for side, name, place in ((evosdpa._torch, "straight", 8), (evosdpa._native, "forward", 8)):
        native = getattr(side, name)
        spy = lambda *given, native=native, place=place: asked.append(given[place]) or native(*given)
        monkeypatch.setattr(side, name, spy)
    out = evosdpa.sdpa(q, k, v, precision="high")
    # The long way, by three dimensions, and the operator.
    assert torch.equal(evosdpa.sdpa(q[0], k[0], v[0], precision="high"), out[0])
    by_operator, _ = torch.ops.evosdpa.forward(q, k, v, None, -1, -1, False, False, False, True)
    assert torch.equal(by_operator, out)
    assert asked[:1] == [True] and asked[-2:] == [True, True], asked
    with pytest.raises(ValueError, match="'highest'"):
        evosdpa.flash_attn_func(q, k, v, precision="highest")


def test_patch():
    q = torch.randn(1, 2, 8, 16)
    original = F.scaled_dot_product_attention
    with evosdpa.patch():
        assert F.scaled_dot_product_attention is not original
        ours = F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True)
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(8, 8))
        with evosdpa.patch(fallback=False), pytest.raises(NotImplementedError):
            F.scaled_dot_product_attention(q.double(), q.double(), q.double())
    assert F.scaled_dot_product_attention is original
    torch.testing.assert_close(ours, original(q, q, q, is_causal=True))
    torch.testing.assert_close(masked, original(q, q, q))

    @evosdpa.patch()
    def inside():
        return F.scaled_dot_product_attention is original

    assert not inside() and F.scaled_dot_product_attention is original


def test_numpy_is_left_to_torch_where_asked():
    import numpy

    x = numpy.random.default_rng(0).standard_normal((1, 2, 4, 8))
    out = evosdpa.sdpa(x, x, x, fallback=True)
    assert isinstance(out, numpy.ndarray) and out.dtype == numpy.float64


def test_what_is_known_of_plain_tensors_holds_for_plain_tensors_alone():
    """Torch is asked by one call whether all is as at the first call of such tensors: each thing that it is asked for must still be seen."""
    import torch.autograd.forward_ad as forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v)
    straight = lambda *tensors: evosdpa._torch.straight(*tensors, None, False, False, False, False, False)
    for _ in range(3):
        torch.testing.assert_close(straight(q, k, v), wanted)
    # Not memory as it is, or differentiated; wherever it stands.
    for at in range(3):
        for change in (torch._neg_view, lambda x: x.clone().requires_grad_(), lambda x: x.to(torch.complex64).conj().imag):
            tensors = [q, k, v]
            tensors[at] = change(tensors[at])
            assert straight(*tensors) is None
    torch.testing.assert_close(evosdpa.sdpa(torch._neg_view(q), k, v), F.scaled_dot_product_attention(-q, k, v))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(straight(*learned), wanted)
    assert straight(*learned) is None
    with pytest.raises(NotImplementedError):
        evosdpa.sdpa(*learned)
    # Watched, cast, transformed, dual.
    with Watching():
        assert straight(q, k, v) is None
        evosdpa.sdpa(q, k, v)
    assert any("evosdpa" in name for name in seen), seen
    with torch.autocast("cpu", torch.bfloat16):
        assert straight(q, k, v) is None
        assert evosdpa.sdpa(q, k, v).dtype == torch.bfloat16
    with forward_ad.dual_level():
        assert straight(q, k, v) is None
    assert torch.func.vmap(lambda x: x if straight(q, k, v) is None else 0 * x)(torch.ones(2)).tolist() == [1, 1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert straight(q, k, v) is None
    # One tensor twice, other states of torch in turns, and plain again.
    torch.testing.assert_close(straight(q, q, q), F.scaled_dot_product_attention(q, q, q))
    for _ in range(70):
        with torch.inference_mode():
            assert straight(q, k, v) is not None
        assert straight(q, k, v) is not None
    torch.testing.assert_close(straight(q, k, v), wanted)
