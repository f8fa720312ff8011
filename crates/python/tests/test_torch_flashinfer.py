"""FlashInfer's wrappers against plain torch."""

import functools
import itertools
import math

import pytest
import torch

import reference
from evosdpa import flashinfer

INT = torch.int32
HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 4
QUERIES, KEYS = [3, 1, 5], [9, 4, 6]


def integers(values):
    return torch.tensor(values, dtype=INT)


def cache(layout):
    """Sequences of KEYS tokens in shuffled pages: the cache, its description, and each one's keys and values."""
    pages = [-(-length // PAGE) for length in KEYS]
    indices = torch.randperm(sum(pages) + 2)[: sum(pages)]
    shape = (sum(pages) + 2, 2, PAGE, HEADS_KV, DIM)
    both = torch.full(shape, torch.nan)
    tokens = []
    for b, (length, start) in enumerate(zip(KEYS, [0, *itertools.accumulate(pages)])):
        token = torch.randn(length, 2, HEADS_KV, DIM)
        for i in range(length):
            both[indices[start + i // PAGE], :, i % PAGE] = token[i]
        tokens.append((token[:, 0], token[:, 1]))
    described = (
        integers([0, *itertools.accumulate(pages)]),
        indices.to(INT),
        integers([(length - 1) % PAGE + 1 for length in KEYS]),
    )
    return both if layout == "NHD" else both.transpose(2, 3).contiguous(), described, tokens


def check(out, lse, wanted):
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double() * math.log(2.0), wanted[1].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_decode(layout, pair):
    both, described, tokens = cache(layout)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, dtype=torch.uint8), layout)
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, window_left=5, logits_soft_cap=2.0, q_data_type=torch.float32)
    q, sinks = torch.randn(3, HEADS, DIM), torch.randn(HEADS)
    given = torch.empty(3, HEADS, DIM)
    kv = (both[:, 0], both[:, 1]) if pair else both
    out, lse = wrapper.run(q, kv, k_scale=0.5, v_scale=3.0, sinks=sinks, return_lse=True, out=given)
    assert out is given
    for b, (k, v) in enumerate(tokens):
        wanted = reference.attention(q[b : b + 1], k, 3 * v, window=(5, -1), scale=0.5 * DIM**-0.5, softcap=2.0, sinks=sinks)
        check(out[b : b + 1], lse[b : b + 1], wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(layout, causal):
    both, described, tokens = cache(layout)
    q = torch.randn(sum(QUERIES), HEADS, DIM)
    indptr = integers([0, *itertools.accumulate(QUERIES)])
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    paged.plan(indptr, *described, HEADS, HEADS_KV, DIM, PAGE, causal=causal, sm_scale=0.3)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(indptr, integers([0, *itertools.accumulate(KEYS)]), HEADS, HEADS_KV, DIM, causal=causal, sm_scale=0.3)
    out, lse = paged.run(q, both, return_lse=True)
    k, v = (torch.cat(parts) for parts in zip(*tokens))
    torch.testing.assert_close(ragged.run(q, k, v), out)
    wanted = reference.varlen(q, k, v, QUERIES, KEYS, causal=causal, scale=0.3)
    assert out.shape == q.shape and lse.shape == (sum(QUERIES), HEADS)
    check(out, lse, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_masks(packed):
    both, described, tokens = cache("NHD")
    q = torch.randn(sum(QUERIES), HEADS, DIM)
    masks = [torch.rand(rows, columns) < 0.6 for rows, columns in zip(QUERIES, KEYS)]
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    if packed:
        bits = [torch.nn.functional.pad(mask.reshape(-1), (0, -mask.numel() % 8)).reshape(-1, 8) for mask in masks]
        flat = (torch.cat(bits) * 2 ** torch.arange(8)).sum(1).to(torch.uint8)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    # A mask takes the place of causal.
    arguments = {"packed_custom_mask" if packed else "custom_mask": flat, "causal": True}
    wrapper.plan(integers([0, *itertools.accumulate(QUERIES)]), *described, HEADS, HEADS_KV, DIM, PAGE, **arguments)
    out = wrapper.run(q, both)
    for part, mask, (k, v), rows in zip(out.split(QUERIES), masks, tokens, q.split(QUERIES)):
        scores = torch.einsum("qhd,khd->hqk", rows, k.repeat_interleave(2, 1)) * DIM**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(part, torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))


def test_eight_bit_caches():
    both, described, tokens = cache("NHD")
    codes = both.nan_to_num(0.0).to(torch.float8_e4m3fn)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_data_type="bfloat16", kv_data_type=torch.float8_e4m3fn)
    q = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16)
    out = wrapper.run(q, codes, k_scale=2.0, v_scale=0.5)
    for b, (k, v) in enumerate(tokens):
        k, v = (x.to(torch.float8_e4m3fn).float() for x in (k, v))
        wanted, _ = reference.attention(q[b : b + 1], 2 * k, 0.5 * v)
        torch.testing.assert_close(out[b : b + 1].double(), wanted, rtol=2.0**-6, atol=1e-3)


@pytest.mark.parametrize("planned", [torch.int8, "int8"])
def test_caches_of_int8(planned):
    both, described, tokens = cache("NHD")
    codes = (both.nan_to_num(0.0) * 30).round().clamp(-128, 127).to(torch.int8)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    decode.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_data_type="bfloat16", kv_data_type=planned)
    q = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16)
    out, lse = decode.run(q, codes, k_scale=1 / 30, v_scale=1 / 15, return_lse=True)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    prefill.plan(integers([0, 1, 2, 3]), *described, HEADS, HEADS_KV, DIM, PAGE, causal=True, q_data_type="bfloat16", kv_data_type=planned)
    torch.testing.assert_close(prefill.run(q, codes, k_scale=1 / 30, v_scale=1 / 15), out)
    for b, (k, v) in enumerate(tokens):
        k, v = ((x * 30).round().clamp(-128, 127) / 30 for x in (k, v))
        wanted, wanted_lse = reference.attention(q[b : b + 1], k, 2 * v)
        torch.testing.assert_close(out[b : b + 1].double(), wanted, rtol=2.0**-6, atol=2e-3)
        torch.testing.assert_close(lse[b].double() * math.log(2.0), wanted_lse[:, 0], rtol=1e-2, atol=1e-2)
    with pytest.raises(TypeError, match="keys hold torch.int8, but were planned with torch.float8_e4m3fn"):
        decode.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_data_type="bfloat16", kv_data_type=torch.float8_e4m3fn)
        decode.run(q, codes)


def test_single():
    q, k, v = torch.randn(5, HEADS, DIM), torch.randn(9, HEADS_KV, DIM), torch.randn(9, HEADS_KV, DIM)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=3, return_lse=True)
    check(out, lse, reference.attention(q, k, v, causal=True, window=(3, -1)))
    heads_first = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    one = flashinfer.single_decode_with_kv_cache(q[0], *heads_first, kv_layout="HND")
    torch.testing.assert_close(one.double(), reference.attention(q[:1], k, v)[0][0], rtol=1e-5, atol=1e-5)


def test_what_is_wrong_is_named():
    both, (indptr, indices, last), _ = cache("NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    sizes = (HEADS, HEADS_KV, DIM, PAGE)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.randn(3, HEADS, DIM), both)
    for error, words, given, more in [
        (TypeError, "indptr holds torch.int64", (indptr.long(), indices, last), {}),
        (ValueError, "not go back", (indptr.flip(0), indices, last), {}),
        (ValueError, "there are 2 indices", (indptr, indices[:2], last), {}),
        (ValueError, "2 values for 3", (indptr, indices, last[:2]), {}),
        (ValueError, "last_page_len of sequence 1 is 5", (indptr, indices, integers([1, 5, 2])), {}),
        (ValueError, "last_page_len of sequence 0 is 0", (indptr, indices, integers([0, 4, 2])), {}),
        (NotImplementedError, "ROPE_LLAMA.*turn q and k", (indptr, indices, last), {"pos_encoding_mode": "ROPE_LLAMA"}),
        (NotImplementedError, "ALIBI.*alibi_slopes", (indptr, indices, last), {"pos_encoding_mode": "ALIBI"}),
        (NotImplementedError, "prefix_len_ptr=", (indptr, indices, last), {"prefix_len_ptr": indptr}),
        (NotImplementedError, "o_data_type", (indptr, indices, last), {"o_data_type": "float32", "q_data_type": "float16"}),
        (NotImplementedError, "window_right=3", (indptr, indices, last), {"window_right": 3}),
        (TypeError, "indices is a list", (indptr, [0, 1], last), {}),
        (TypeError, "a data type is 'fp16'", (indptr, indices, last), {"q_data_type": "fp16"}),
        (ValueError, "q_len_per_req is 0", (indptr, indices, last), {"q_len_per_req": 0}),
        (ValueError, "4 query heads cannot share 0", (indptr, indices, last), {}),
    ]:
        with pytest.raises(error, match=words):
            wrapper.plan(*given, *(sizes if "share 0" not in words else (HEADS, 0, DIM, PAGE)), **more)
    with pytest.raises(ValueError, match="needs paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True)
    with pytest.raises(ValueError, match="NDH"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NDH")
    wrapper.plan(indptr, indices, last, *sizes, q_data_type=torch.float16)
    with pytest.raises(TypeError, match="planned with torch.float16"):
        wrapper.run(torch.randn(3, HEADS, DIM), both)
    wrapper.plan(indptr, indices + 8, last, *sizes)
    with pytest.raises(ValueError, match="pages"):
        wrapper.run(torch.randn(3, HEADS, DIM), both)
    with pytest.raises(ValueError, match="planned with"):
        wrapper.run(torch.randn(3, 2, DIM), both)
    q = torch.randn(3, HEADS, DIM)
    for error, words, kv, more in [
        (ValueError, "pages of 2 tokens in the layout NHD, but was planned with 4", both.transpose(2, 3), {}),
        (ValueError, r"use \[pages, page size, heads, dim\]", (both[0, 0], both[0, 0]), {}),
        (NotImplementedError, "kv_cache_sf=", both, {"kv_cache_sf": both}),
        (NotImplementedError, r"k_scale has shape \[2\]", both, {"k_scale": torch.ones(2)}),
    ]:
        with pytest.raises(error, match=words):
            wrapper.run(q, kv, **more)
    prefill, lengths = flashinfer.BatchPrefillWithPagedKVCacheWrapper(), integers([0, *itertools.accumulate(QUERIES)])
    count = sum(rows * columns for rows, columns in zip(QUERIES, KEYS))
    for error, words, more in [
        (ValueError, f"custom_mask has {count + 1} values, but .* planned have {count}", {"custom_mask": torch.ones(count + 1, dtype=torch.bool)}),
        (ValueError, f"custom_mask has {count - 1} values", {"custom_mask": torch.ones(count - 1, dtype=torch.bool)}),
        (TypeError, "custom_mask holds torch.float32", {"custom_mask": torch.zeros(count)}),
        (TypeError, "packed_custom_mask holds torch.bool", {"packed_custom_mask": torch.ones(count, dtype=torch.bool)}),
    ]:
        with pytest.raises(error, match=words):
            prefill.plan(lengths, indptr, indices, last, *sizes, **more)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    for words, q_indptr, kv_indptr in [
        (r"qo_indptr is \[0, 3, 2\]", integers([0, 3, 2]), integers([0, 3, 4])),
        ("kv_indptr is .* not go back", integers([0, 3, 4]), integers([0, 2**31 - 1, -(2**31)])),
        ("qo_indptr is empty", integers([]), integers([0])),
        ("queries are of 2 sequences, keys of 1", integers([0, 3, 4]), integers([0, 4])),
    ]:
        with pytest.raises(ValueError, match=words):
            ragged.plan(q_indptr, kv_indptr, HEADS, HEADS_KV, DIM, custom_mask=torch.ones(4, dtype=torch.bool))


def test_what_says_nothing_is_taken():
    """Callers name every argument of FlashInfer's newest version."""
    both, described, tokens = cache("NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, o_data_type="float32", window_right=0, q_len_per_req=1, disable_split_kv=True)
    q = torch.randn(3, HEADS, DIM)
    out = wrapper.run(q, both, kv_cache_sf=None, q_len_per_req=1, skip_softmax_threshold_scale_factor=None)
    assert torch.equal(out, wrapper.run(q, both, return_lse=True)[0])
    with pytest.raises(TypeError, match="planned with torch.float32"):
        wrapper.run(q.half(), both.half())
    codes = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    codes.plan(*described, HEADS, HEADS_KV, DIM, PAGE, data_type=torch.float8_e4m3fn, o_data_type=torch.bfloat16)
    e4m3 = both.nan_to_num(0.0).to(torch.float8_e4m3fn)
    assert codes.run(q.to(torch.float8_e4m3fn), e4m3).dtype == torch.bfloat16
    named = {"rope_scale": None, "rope_theta": None, "kv_cache_sf": None, "scale_q": None, "o_dtype": torch.float32, "backend": "fa2"}
    k, v = tokens[0]
    torch.testing.assert_close(flashinfer.single_prefill_with_kv_cache(q[:1], k, v, **named), out[:1])
    torch.testing.assert_close(flashinfer.single_decode_with_kv_cache(q[0], k, v, rope_scale=1.0, use_tensor_cores=True), out[0])


def test_several_queries_of_each_sequence():
    both, described, tokens = cache("HND")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "HND")
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_len_per_req=2)
    q = torch.randn(6, HEADS, DIM)
    for out, lse in (wrapper.run_return_lse(q, both), wrapper.forward_return_lse(q, both)):
        assert torch.equal(wrapper.run(q, both), out)
        for b, (k, v) in enumerate(tokens):
            check(out[2 * b : 2 * b + 2], lse[2 * b : 2 * b + 2], reference.attention(q[2 * b : 2 * b + 2], k, v, causal=True))


def test_queries_that_are_not_planned_are_refused():
    """More of them than planned would be answered with zeros."""
    both, described, tokens = cache("NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    for q_len, rows, more, words in [
        (2, 9, {}, "q has 9 rows, but was planned with 3 sequences of q_len_per_req=2"),
        (2, 3, {}, "q has 3 rows"),
        (2, 9, {"return_lse": True}, "q has 9 rows"),
        (2, 6, {"q_len_per_req": 3}, "q_len_per_req is 3, but was planned with 2"),
        (1, 6, {"q_len_per_req": 2}, "q_len_per_req is 2, but was planned with 1"),
    ]:
        wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_len_per_req=q_len)
        with pytest.raises(ValueError, match=words):
            wrapper.run(torch.randn(rows, HEADS, DIM), both, **more)
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_len_per_req=2)
    q = torch.randn(6, HEADS, DIM)
    assert torch.equal(wrapper.run(q, both, q_len_per_req=2), wrapper.run(q, both))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    prefill.plan(integers([0, 1, 2, 3]), *described, HEADS, HEADS_KV, DIM, PAGE)
    with pytest.raises(ValueError, match="q_len_per_req is 2, but was planned with queries of any number"):
        prefill.run(q[:3], both, q_len_per_req=2)
    for given in ({"out": torch.empty(9, HEADS, DIM)}, {"out": torch.empty(6, HEADS, 1)}, {"lse": torch.empty(1, HEADS), "return_lse": True}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))} has shape .*, but the result has \[6, "):
            wrapper.run(q, both, **given)


def test_scales_outputs_and_codes_take_the_short_way(monkeypatch):
    """Servers give them in every call: one native call with the bits of the long way."""
    both, described, _ = cache("NHD")
    q, k, v = torch.randn(3, HEADS, DIM), torch.randn(9, HEADS_KV, DIM), torch.randn(9, HEADS_KV, DIM)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    decode.plan(*described, HEADS, HEADS_KV, DIM, PAGE)
    capped = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    capped.plan(integers([0, 1, 2, 3]), *described, HEADS, HEADS_KV, DIM, PAGE, causal=True, logits_soft_cap=20.0, sm_scale=0.3)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(integers([0, 3]), integers([0, 9]), HEADS, HEADS_KV, DIM)
    coded = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    coded.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_data_type="bfloat16", kv_data_type=torch.float8_e4m3fn)
    codes = both.nan_to_num(0.0).to(torch.float8_e4m3fn)
    runs = [
        functools.partial(decode.run, q, both),
        functools.partial(capped.run, q, both),
        functools.partial(ragged.run, q, k, v),
        functools.partial(coded.run, q.bfloat16(), codes),
    ]
    options = [{}, {"k_scale": 1.0, "v_scale": 1.0}, {"q_scale": 0.7, "k_scale": 1.3, "v_scale": 3.0}, {"sinks": torch.randn(HEADS)}]
    calls = [(run, {**option, "return_lse": True}) for run in runs for option in options]
    plan = type(decode._plan())
    with monkeypatch.context() as only:
        only.setattr(plan, "straight", lambda *given: None)
        wanted = [run(**option) for run, option in calls]
        by_tensor = decode.run(q, both, k_scale=torch.tensor(1.3), v_scale=torch.tensor(3.0))

    def refuse(*given):
        raise AssertionError("the long way")

    monkeypatch.setattr(plan, "attend", refuse)
    for (run, option), (out, lse) in zip(calls, wanted):
        got, got_lse = run(**option)
        assert torch.equal(got, out) and torch.equal(got_lse, lse) and got_lse.is_contiguous(), (run, option)
        given = torch.empty_like(out)
        assert run(**{**option, "return_lse": False, "out": given}) is given and torch.equal(given, out)
    assert torch.equal(decode.run(q, both, k_scale=1.3, v_scale=3.0), by_tensor)
    with pytest.raises(AssertionError, match="the long way"):
        decode.run(q, both, v_scale=torch.tensor(2.0))


def test_a_data_type_of_codes_is_the_caches():
    both, described, tokens = cache("NHD")
    codes = both.nan_to_num(0.0).to(torch.float8_e4m3fn)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    q = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16)
    wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn)
    wanted = wrapper.run(q, codes)
    for data_type in ("float8_e4m3fn", torch.float8_e4m3fn):
        wrapper.plan(*described, HEADS, HEADS_KV, DIM, PAGE, data_type=data_type)
        assert torch.equal(wrapper.run(q, codes), wanted)
        with pytest.raises(TypeError, match="keys hold torch.float32, but were planned with torch.float8_e4m3fn"):
            wrapper.run(q, both)


def test_other_names_of_planning():
    both, (indptr, indices, last), tokens = cache("NHD")
    sizes, q = (HEADS, HEADS_KV, DIM, PAGE), torch.randn(3, HEADS, DIM)
    plain = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD", False, use_tensor_cores=True)
    plain.plan(indptr, indices, last, *sizes)
    wanted = plain.run(q, both)
    assert plain.use_tensor_cores and not plain.is_cuda_graph_enabled
    steady = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, integers([0] * 4), integers([0] * 7), integers([0] * 3))
    assert steady.is_cuda_graph_enabled and not steady.use_tensor_cores
    steady.reset_workspace_buffer(None, None)
    for wrapper in (plain, steady):
        # As servers do it; the host's copy may have room for more sequences.
        wrapper.plan = functools.partial(flashinfer.fast_decode_plan, wrapper)
        wrapper.plan(None, indices, last, *sizes, non_blocking=True, global_override_indptr_cpu=torch.cat([indptr, integers([0, 0])]))
        assert torch.equal(wrapper.run(q, both), wanted)
        wrapper.plan(indptr, indices, last, *sizes, window_left=0)
        assert not torch.equal(wrapper.run(q, both), wanted)
    with pytest.raises(ValueError, match="q_len_per_req is 2, but graphs of this wrapper have 1"):
        steady.plan(indptr, indices, last, *sizes, q_len_per_req=2)


def test_older_forms_of_run_say_again_what_was_planned():
    both, described, tokens = cache("NHD")
    q = torch.randn(sum(QUERIES), HEADS, DIM)
    indptr = integers([0, *itertools.accumulate(QUERIES)])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(indptr, *described, HEADS, HEADS_KV, DIM, PAGE, logits_soft_cap=1.0, window_left=1)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(indptr, integers([0, *itertools.accumulate(KEYS)]), HEADS, HEADS_KV, DIM, causal=True)
    k, v = (torch.cat(parts) for parts in zip(*tokens))
    for causal, window, cap, scale in ((True, 3, 2.0, 0.3), (False, -1, None, None)):
        wanted = reference.varlen(q, k, v, QUERIES, KEYS, causal=causal, window=(window, -1), softcap=cap or 0.0, scale=scale)
        named = {"causal": causal, "window_left": window, "logits_soft_cap": cap, "sm_scale": scale, "rope_theta": 1e4}
        check(*wrapper.forward_return_lse(q, both, **named), wanted)
        check(*wrapper.run(q, both, return_lse=True), wanted)
        torch.testing.assert_close(ragged.forward(q, k, v, **named).double(), wanted[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="ALIBI"):
        wrapper.forward(q, both, pos_encoding_mode="ALIBI")


def test_plans_for_graphs_stay_where_they_are():
    both, (indptr, indices, last), tokens = cache("NHD")
    room = {"paged_kv_indptr_buffer": integers([0] * 4), "paged_kv_indices_buffer": integers([0] * 7), "paged_kv_last_page_len_buffer": integers([0] * 3)}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD", use_cuda_graph=True, **room)
    q, sizes = torch.randn(3, HEADS, DIM), (HEADS, HEADS_KV, DIM, PAGE)
    places = set()
    # The second sequence goes, then comes back: a graph would read the same tables.
    for taken in ([0, 1, 2], [0, 2, 2], [2, 1, 0]):
        parts = [indices[indptr[b] : indptr[b + 1]] for b in taken]
        starts = integers([0, *itertools.accumulate(len(part) for part in parts)])
        wrapper.plan(starts, torch.cat(parts), last[taken], *sizes)
        out = wrapper.run(q, both)
        places.add(tuple(value.data_ptr() for value in wrapper._plan().side.values()))
        for row, b in enumerate(taken):
            wanted, _ = reference.attention(q[row : row + 1], *tokens[b])
            torch.testing.assert_close(out[row : row + 1].double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(places) == 1
    with pytest.raises(ValueError, match="2 sequences are planned, but the buffers .* are of 3"):
        wrapper.plan(indptr[:3], indices, last[:2], *sizes)
    with pytest.raises(ValueError, match="8 pages, but the buffer of indices has room for 7"):
        wrapper.plan(integers([0, 8, 8, 8]), integers([0] * 8), integers([1, 0, 0]), *sizes)
    rows = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(use_cuda_graph=True, qo_indptr_buf=integers([0] * 3), kv_indptr_buf=integers([0] * 3))
    k, v, q = (torch.randn(7, HEADS, DIM) for _ in range(3))
    for lengths in ([3, 4], [6, 1]):
        rows.plan(integers([0, lengths[0], 7]), integers([0, lengths[0], 7]), HEADS, HEADS, DIM, causal=True)
        wanted, _ = reference.varlen(q, k, v, lengths, lengths, causal=True)
        for out in (rows.run(q, k, v), rows.run(q, k, v, return_lse=True)[0]):
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_splits_of_one_size_ask_for_the_same_bits_in_any_batch(monkeypatch):
    """What native calls were asked, which on a CPU shows in no result."""
    from evosdpa import _flashinfer, _native

    asked = []

    def watched(module, name):
        call = getattr(module, name)

        def instead(*arguments):
            asked.append(_native.set_batch_invariant_here(True))
            _native.set_batch_invariant_here(asked[-1])
            return call(*arguments)

        monkeypatch.setattr(module, name, instead)

    watched(_native, "straight_cache")
    watched(_flashinfer._cache_torch, "attend")
    both, (indptr, indices, last), tokens = cache("NHD")
    q = torch.randn(3, HEADS, DIM)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    cases = [({}, False), ({"fixed_split_size": 2048}, True), ({"disable_split_kv": True}, True), ({"fixed_split_size": -1, "disable_split_kv": False}, False)]
    for options, wanted in cases:
        wrapper.plan(indptr, indices, last, HEADS, HEADS_KV, DIM, PAGE, **options)
        asked.clear()
        out = wrapper.run(q, both)
        assert torch.equal(wrapper.run(q, both, return_lse=True)[0], out)
        assert asked == [wanted] * 2, options
        assert _native.set_batch_invariant_here(False) is False
    with pytest.raises(ValueError, match="fixed_split_size is 0, but must be"):
        wrapper.plan(indptr, indices, last, HEADS, HEADS_KV, DIM, PAGE, fixed_split_size=0)
