"""Caches of 8-bit codes with their scales."""

import pytest
import torch

import evosdpa
import reference
from reference import close

INT = torch.int32


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float8_e4m3fn])
def test_eight_bit_caches(query):
    cache_k, cache_v = (torch.randn(2, 8, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(2, 1, 4, 16).to(query)
    descale = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    out = evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=6, **descale)
    plain = evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=6)
    assert out.dtype == torch.bfloat16
    for b in range(2):
        scale = {name: tensor[b][None, :, None] for name, tensor in descale.items()}
        one_q = q[b].float()
        wanted, _ = reference.attention(one_q, cache_k[b, :6].float(), cache_v[b, :6].float())
        close(plain[b], wanted)
        if query == torch.float8_e4m3fn:
            one_q = one_q * scale["q_descale"].repeat_interleave(2, dim=1)
        keys, values = cache_k[b, :6].float() * scale["k_descale"], cache_v[b, :6].float() * scale["v_descale"]
        close(out[b], reference.attention(one_q, keys, values)[0])
    new = torch.randn(2, 1, 2, 16).to(torch.float8_e4m3fn)
    evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, new, new, cache_seqlens=6)
    assert torch.equal(cache_k[:, 6].view(torch.uint8), new[:, 0].view(torch.uint8))


def integer_values(codes):
    return codes.float() if codes.dtype == torch.int8 else (codes.float() - 128) * 448 / 127


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_caches_of_integer_codes(kind, query):
    """Codes of int8 are numbers, -128 among them; those of uint8 lie evenly around 128. New tokens are codes and are copied."""
    lowest = torch.iinfo(kind).min
    cache_k, cache_v = (torch.randint(lowest, lowest + 256, (2, 8, 2, 16), dtype=kind) for _ in range(2))
    cache_v[:, 0] = lowest
    q, descale = torch.randn(2, 1, 4, 16).to(query), torch.rand(2, 2) * 0.01 + 0.005
    descale = descale if kind == torch.int8 else descale * 127 / 448
    scales = {"k_descale": descale, "v_descale": descale.flip(0)}
    out = evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=6, **scales)
    assert out.dtype == query

    def check(out, held):
        for b in range(2):
            keys, values = (
                integer_values(x[b, :held]) * scale[b][None, :, None] for x, scale in zip((cache_k, cache_v), scales.values())
            )
            close(out[b], reference.attention(q[b].float(), keys, values)[0])

    check(out, 6)
    # By one native call where lengths and scales are tensors.
    held = torch.full((2,), 6, dtype=INT)
    assert torch.equal(out, evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=held, **scales))
    new = torch.randint(lowest, lowest + 256, (2, 1, 2, 16), dtype=kind)
    out = evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, new, new, cache_seqlens=6, **scales)
    assert torch.equal(cache_k[:, 6], new[:, 0]) and torch.equal(cache_v[:, 6], new[:, 0])
    check(out, 7)
    plain = evosdpa.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=1)
    torch.testing.assert_close(plain.float(), integer_values(cache_v[:, :1]).repeat_interleave(2, 2), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("wrong", ["k_cache", "k"])
def test_other_codes_are_refused(wrong):
    q, cache, new = torch.randn(2, 1, 4, 16).bfloat16(), torch.zeros(2, 8, 2, 16, dtype=torch.int8), torch.zeros(2, 1, 2, 16)
    if wrong == "k":
        with pytest.raises(TypeError, match="k holds torch.bfloat16, but k_cache holds torch.int8; convert it"):
            evosdpa.flash_attn_with_kvcache(q, cache, cache, new.bfloat16(), new.bfloat16(), cache_seqlens=6)
        return
    with pytest.raises(NotImplementedError, match="float8_e5m2.*for caches with scales float8_e4m3fn, int8 or uint8; scales give"):
        evosdpa.flash_attn_with_kvcache(q, cache.to(torch.float8_e5m2), cache.to(torch.float8_e5m2), cache_seqlens=6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_caches_of_codes_are_compiled_without_a_graph_break(dynamic):
    def step(q, k_cache, v_cache, k, v, held, scale):
        return evosdpa.flash_attn_with_kvcache(2 * q, k_cache, v_cache, k, v, cache_seqlens=held, k_descale=scale, v_descale=scale) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for new in (1, 3):
        q = torch.randn(2, new, 4, 16, dtype=torch.bfloat16)
        caches = [torch.randint(-128, 128, (2, 9, 2, 16), dtype=torch.int8) for _ in "kv"]
        k, v = (torch.randint(-128, 128, (2, new, 2, 16), dtype=torch.int8) for _ in "kv")
        copies = [x.clone() for x in caches]
        held, scale = torch.tensor([2, 5], dtype=INT), torch.rand(2, 2) * 0.01
        with torch.no_grad():
            wanted, ours = step(q, *copies, k, v, held, scale), compiled(q, *caches, k, v, held, scale)
        for mine, theirs in zip((ours, *caches), (wanted, *copies)):
            torch.testing.assert_close(mine, theirs)


def test_codes_with_scales_are_read_as_they_lie():
    e4m3 = torch.float8_e4m3fn
    for turn in range(2):
        q = torch.randn(3, 2, 4, 32, dtype=torch.bfloat16)
        codes = [torch.randn(3, 20, 2, 32).to(e4m3) for _ in "kv"]
        scales = [torch.rand(3, 2) + 0.5 for _ in "kv"]
        used = torch.tensor([20, 7 + turn, 13], dtype=INT)
        given = dict(cache_seqlens=used, k_descale=scales[0], v_descale=scales[1], causal=True)
        out = evosdpa.flash_attn_with_kvcache(q, *codes, **given)
        # Transposed scales are for the long way to copy.
        strided = {name: scale.T.contiguous().T for name, scale in zip(("k_descale", "v_descale"), scales)}
        assert torch.equal(out, evosdpa.flash_attn_with_kvcache(q, *codes, **given | strided))
        k, v = (x.float() * scale[:, None, :, None] for x, scale in zip(codes, scales))
        for b in range(3):
            n = int(used[b])
            wanted, _ = reference.attention(q[b].float(), k[b, :n], v[b, :n], causal=True)
            torch.testing.assert_close(out[b].double(), wanted, rtol=2e-2, atol=2e-2)
