"""What changes scores takes the short way through one native call, with the bits of the long way."""

import types

import pytest
import torch
import torch.nn.functional as F

import evosdpa
import evosdpa.transformers

HEADS = 4


@pytest.fixture
def ways(monkeypatch):
    """Runs a call by both ways, asks for the same bits, and says whether the short one took it."""
    places = {"straight": evosdpa._torch, "straight_cache": evosdpa._native}
    short = {name: getattr(place, name) for name, place in places.items()}

    def run(call):
        taken = []

        def watched(function):
            def straight(*given):
                taken.append(function(*given))
                return taken[-1]

            return straight

        results = []
        for way in (watched, lambda function: lambda *given: None):
            for name, function in short.items():
                monkeypatch.setattr(places[name], name, way(function))
            out = call()
            results.append(out if isinstance(out, tuple) else (out,))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        return len(taken) == 1 and taken[0] is not None

    return run


def drawn(*shape, dtype=torch.float32, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype=torch.float32):
    return drawn(2, HEADS, 5, 16, dtype=dtype), drawn(2, 2, 7, 16, dtype=dtype, seed=6), drawn(2, 2, 7, 24, dtype=dtype, seed=7)


def masks(dtype):
    numbers = drawn(2, HEADS, 5, 7)
    yield from (numbers, numbers > 0, numbers[:1], numbers[:, :1], numbers[:, :, :1] > 0, numbers[0, 0], numbers[:1, :1, :1, :])
    yield numbers[1:, :1].expand(2, HEADS, 5, 7)
    yield drawn(3, 6, 5, 20)[:2, 1:5, :, 3:10]
    yield drawn(2, 5, HEADS, 7).transpose(1, 2) > 0
    if dtype != torch.float32:
        yield numbers.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(ways, dtype):
    q, k, v = tensors(dtype)
    for mask in masks(dtype):
        assert ways(lambda: evosdpa.sdpa(q, k, v, mask, scale=0.4, enable_gqa=True)), (mask.shape, mask.stride())
        with evosdpa.patch():
            k_own, v_own = (x.repeat_interleave(2, 1) for x in (k, v))
            assert ways(lambda: F.scaled_dot_product_attention(q, k_own, v_own, mask))


def test_a_mask_of_a_known_form_is_read_anew():
    q, k, v = tensors()
    for seed in range(3):
        for mask in (drawn(2, 1, 5, 7, seed=seed) > 0.5, drawn(2, 1, 5, 7, seed=seed)):
            wanted = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            seen = wanted.isfinite()  # of rows that see no key torch makes NaN
            torch.testing.assert_close(evosdpa.sdpa(q, k, v, mask, enable_gqa=True)[seen], wanted[seen], rtol=1e-4, atol=1e-5)


def test_masks_out_of_the_ordinary_take_the_long_way(ways):
    q, k, v = tensors()
    numbers = drawn(2, HEADS, 5, 7)
    call = lambda mask: lambda: evosdpa.sdpa(q, k, v, mask, enable_gqa=True)
    for mask in (
        numbers[0, :1],  # three dimensions: torch's own output is contiguous then
        numbers[0, 0, 0],
        numbers[..., :1],
        numbers.repeat_interleave(2, 3)[..., ::2],
        drawn(2, HEADS, 7, 5).transpose(2, 3),
        drawn(1).expand(5, 7),
        torch.nn.Parameter(numbers, requires_grad=False),
    ):
        assert not ways(call(mask)), (mask.shape, mask.stride())
    differentiated = numbers.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="requires grad"):
        call(differentiated)()
    with torch.no_grad():
        assert ways(call(differentiated))
    for wrong, error in ((numbers[..., :6], ValueError), (numbers[:, :3], ValueError), (numbers.double(), TypeError), (numbers.half(), TypeError)):
        with pytest.raises(error):
            call(wrong)()
    with pytest.raises(ValueError, match="is_causal"):
        evosdpa.sdpa(q, k, v, numbers, is_causal=True, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not ways(call(numbers))


def modifiers():
    sinks, slopes = drawn(HEADS), drawn(HEADS).abs()
    yield {"softcap": 3.0}
    yield {"softcap": 3}
    yield {"attention_chunk": 3}
    yield {"alibi_slopes": slopes}
    yield {"s_aux": sinks}
    yield {"learnable_sink": sinks}
    yield {"softcap": 2.0, "attention_chunk": 4, "alibi_slopes": slopes, "s_aux": sinks, "causal": True}


def test_modifiers_of_flash_attention(ways):
    q, k, v = (x.transpose(1, 2) for x in tensors())
    for named in modifiers():
        with_lse = {**named, "return_softmax_lse": True}
        assert ways(lambda: evosdpa.flash_attn_func(q, k, v, **named)), named.keys()
        assert ways(lambda: evosdpa.flash_attn_func(q, k, v, **with_lse)), named.keys()


def test_modifiers_of_packed_sequences_and_caches(ways):
    lengths = [3, 0, 4]
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    q, k, v = drawn(7, HEADS, 16), drawn(7, 2, 16, seed=6), drawn(7, 2, 24, seed=7)
    cache = drawn(2, 12, 2, 16, seed=8), drawn(2, 12, 2, 24, seed=9)
    held = torch.tensor([5, 0], dtype=torch.int32)
    new = drawn(2, 3, 2, 16, seed=1), drawn(2, 3, 2, 24, seed=2)
    angles = {"rotary_cos": drawn(20, 8, seed=3), "rotary_sin": drawn(20, 8, seed=4)}
    for named in modifiers():
        assert ways(lambda: evosdpa.flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), **named)), named.keys()
        if "learnable_sink" in named:
            continue

        def append(**more):
            room = tuple(x.clone() for x in cache)
            out = evosdpa.flash_attn_with_kvcache(drawn(2, 3, HEADS, 16), *room, *new, cache_seqlens=held, **named, **more)
            return out, *room

        assert ways(append), named.keys()
        assert ways(lambda: append(**angles)), named.keys()


def test_modifiers_out_of_the_ordinary_take_the_long_way(ways):
    q, k, v = (x.transpose(1, 2) for x in tensors())
    call = lambda **named: lambda: evosdpa.flash_attn_func(q, k, v, **named)
    slopes = drawn(HEADS).abs()
    for named in (
        {"softcap": torch.tensor(3.0)},
        {"alibi_slopes": slopes.expand(2, HEADS)},
        {"s_aux": slopes.bfloat16()},
    ):
        assert not ways(call(**named)), named.keys()
    every_second = drawn(HEADS, 2).abs()[:, 0]
    for wrong in ({"s_aux": slopes[:3]}, {"alibi_slopes": every_second}, {"alibi_slopes": drawn(3, HEADS)}, {"softcap": -1.0}, {"softcap": float("nan")}, {"attention_chunk": -2}):
        with pytest.raises((ValueError, NotImplementedError)):
            call(**wrong)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_transformers(ways, dtype):
    q, k, v = tensors(dtype)
    layer = types.SimpleNamespace(is_causal=False, training=False)
    sinks = torch.nn.Parameter(drawn(HEADS, dtype=dtype))
    forward = evosdpa.transformers.evosdpa_attention_forward
    bias = drawn(1, HEADS, 5, 7, dtype=dtype)
    with torch.no_grad():
        for mask, named in (
            (None, {"softcap": 20.0}),
            (None, {"s_aux": sinks}),
            (None, {"position_bias": bias}),
            (bias > 0, {}),
            (bias, {"softcap": 20.0}),
        ):
            assert ways(lambda: forward(layer, q, k, v, mask, **named)[0]), named.keys()
    # Whoever wants the sinks' gradient gets torch's way.
    out, _ = forward(layer, q, k, v, None, s_aux=sinks)
    assert out.requires_grad
