"""Calls over packed sequences and caches that are refused: by name, and before anything is written."""

import pytest
import torch

import evosdpa
from reference import cumulative

INT = torch.int32


def test_checked_mode_refuses_before_anything_is_queued(monkeypatch):
    """What EVOSDPA_CHECK=1 does with the lists of CUDA tensors, here with those of a CPU."""
    queued = []
    monkeypatch.setattr(evosdpa._native, "straight_cache", lambda *given: None)
    monkeypatch.setattr(evosdpa._cache_torch, "is_checked", lambda x: True)
    monkeypatch.setattr(evosdpa._native, "append", lambda *given: queued.append(given))
    pages, q, new = torch.randn(8, 4, 2, 16), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    angles = torch.randn(6, 8)
    good = {"cache_seqlens": torch.tensor([3, 6], dtype=INT), "page_table": torch.tensor([[0, 1], [2, 3]], dtype=INT)}
    cases = [
        ("page 8|at 8", {"page_table": torch.tensor([[0, 1], [2, 8]], dtype=INT)}),
        ("-1", {"page_table": torch.tensor([[-1, 1], [2, 3]], dtype=INT)}),
        ("sequence 1 holds 8 tokens .* room for 8", {"cache_seqlens": torch.tensor([3, 8], dtype=INT)}),
        ("sequence 0 uses -2 keys", {"cache_seqlens": torch.tensor([-2, 6], dtype=INT)}),
        ("sequences 1 and 0", {"page_table": torch.tensor([[0, 1], [2, 0]], dtype=INT), "cache_seqlens": torch.tensor([4, 6], dtype=INT)}),
        ("position 6", {"rotary_cos": angles, "rotary_sin": angles}),
    ]
    for said, change in cases:
        with pytest.raises(ValueError, match=said):
            evosdpa.flash_attn_with_kvcache(q, pages, pages.clone(), new, new, **{**good, **change})
        assert not queued
    evosdpa.flash_attn_with_kvcache(q, pages, pages.clone(), new, new, **good)
    assert len(queued) == 1
    # Queries are turned at positions of their own.
    monkeypatch.setattr(evosdpa._native, "rotate", lambda *given: queued.append(given))
    with pytest.raises(ValueError, match="sequence 1 has a token at position 6"):
        evosdpa._cache_torch.rotate(q, angles, angles, good["cache_seqlens"], None, True, True)
    assert len(queued) == 1


def test_what_is_wrong_is_named():
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 4, 2, 8)
    new = torch.randn(2, 1, 2, 8)
    pages = torch.randn(3, 2, 2, 8)
    table = torch.tensor([[0, 1], [2, 0]], dtype=INT)
    held = torch.tensor([3, 1], dtype=INT)
    cos = torch.ones(9, 4)
    call = evosdpa.flash_attn_with_kvcache
    before = cache.clone(), pages.clone()
    for error, words, arguments in [
        (NotImplementedError, "qv is given", {"qv": q}),
        (ValueError, "page_table and block_table", {"page_table": table, "block_table": table}),
        (TypeError, "cache_seqlens holds int64", {"cache_seqlens": held.long()}),
        (TypeError, "cache_seqlens is a list", {"cache_seqlens": [3, 1]}),
        (TypeError, "cache_seqlens is torch.sparse_coo", {"cache_seqlens": held.to_sparse()}),
        (TypeError, "page_table is torch.sparse_coo", {"page_table": table.to_sparse()}),
        (TypeError, "s_aux is torch.sparse_coo", {"s_aux": torch.ones(2).to_sparse()}),
        (TypeError, "rotary_cos is torch.sparse_coo", {"k": new, "v": new, "cache_seqlens": held, "rotary_cos": cos.to_sparse(), "rotary_sin": cos}),
        (ValueError, r"cache_seqlens has shape \[3\]", {"cache_seqlens": torch.ones(3, dtype=INT)}),
        (ValueError, "uses 5 keys", {"cache_seqlens": 5}),
        (ValueError, "cache_seqlens is -1", {"cache_seqlens": -1}),
        (ValueError, "uses -1 keys", {"cache_seqlens": held - 2}),
        (ValueError, "cache_seqlens is 1099511627776", {"cache_seqlens": 2**40}),
        (ValueError, "meta", {"cache_seqlens": held.to("meta")}),
        (TypeError, "cache_leftpad holds float32", {"cache_leftpad": torch.zeros(2)}),
        (ValueError, "left padding of 4", {"cache_seqlens": held, "cache_leftpad": torch.tensor([4, 0], dtype=INT)}),
        (ValueError, "index 2 of a cache with 2", {"cache_batch_idx": torch.tensor([0, 2], dtype=INT)}),
        (ValueError, "index -1", {"cache_batch_idx": torch.tensor([0, -1], dtype=INT)}),
        (ValueError, "v is missing", {"k": new, "cache_seqlens": held}),
        (ValueError, "k is missing", {"v": new, "cache_seqlens": held}),
        (ValueError, "cache_seqlens is missing", {"k": new, "v": new}),
        (ValueError, "holds 4 tokens and gets 1 more", {"k": new, "v": new, "cache_seqlens": 4}),
        (ValueError, "-2 keys", {"k": new, "v": new, "cache_seqlens": held - 3}),
        (ValueError, "sequences 1 and 0", {"k": new, "v": new, "cache_seqlens": 1, "cache_batch_idx": torch.zeros(2, dtype=INT)}),
        (TypeError, "k holds torch.float16", {"k": new.half(), "v": new.half(), "cache_seqlens": held}),
        (ValueError, "k has shape", {"k": new[:, 0], "v": new, "cache_seqlens": held}),
        (ValueError, "lies in the memory of k_cache", {"k": cache[:, 3:], "v": new, "cache_seqlens": held}),
        (ValueError, "come together", {"k": new, "v": new, "cache_seqlens": held, "rotary_cos": cos}),
        (ValueError, "k is missing", {"rotary_cos": cos, "rotary_sin": cos}),
        (ValueError, "position 3", {"k": new, "v": new, "cache_seqlens": held, "rotary_cos": cos[:3], "rotary_sin": cos[:3]}),
        (ValueError, "5 columns", {"k": new, "v": new, "cache_seqlens": held, "rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)}),
        (NotImplementedError, "slopes a head", {"alibi_slopes": torch.zeros(2, 2)}),
        (ValueError, "window_size is", {"window_size": (-2, 0)}),
        (ValueError, "window_size is", {"window_size": (1, 2, 3)}),
        (TypeError, "a side of window_size is a float; give a whole number", {"window_size": (1.5, 0)}),
        (TypeError, "attention_chunk is a float; give a whole number", {"attention_chunk": 2.5}),
        (NotImplementedError, "no kernel for device meta; use cpu or cuda$", {"q": q.to("meta")}),
        (ValueError, "sequence 1 uses 2 keys, but the cache has room for none", {"k_cache": cache[:, :0], "v_cache": cache[:, :0], "cache_seqlens": held % 3 * 2}),
        (ValueError, "sequence 0 uses 3 keys, but the cache has room for none", {"page_table": table[:, :0], "cache_seqlens": held}),
        (ValueError, "the same memory", {"k_cache": cache, "v_cache": cache, "k": new, "v": new + 1, "cache_seqlens": held}),
    ]:
        with pytest.raises(error, match=words):
            call(**{"q": q, "k_cache": cache, "v_cache": cache.clone(), **arguments})
    for error, words, arguments in [
        (ValueError, "at 3, but there are 3 pages", {"page_table": table + 1, "cache_seqlens": 2}),
        (TypeError, "page_table holds int64", {"page_table": table.long()}),
        (ValueError, r"page_table has shape \[2\]", {"page_table": table[0]}),
        (ValueError, "1 rows, but there are 2", {"page_table": table[:1]}),
        (ValueError, "uses 5 keys", {"page_table": table, "cache_seqlens": 5}),
        (ValueError, "page_table has no columns", {"page_table": table[:, :0], "k": new, "v": new, "cache_seqlens": 0}),
        # The second sequence writes into a page that the first one reads.
        (ValueError, "sequences 1 and 0", {"page_table": table, "k": new, "v": new, "cache_seqlens": torch.tensor([1, 2], dtype=INT)}),
    ]:
        with pytest.raises(error, match=words):
            call(q, pages, pages.clone(), **arguments)
    assert torch.equal(cache, before[0]) and torch.equal(pages, before[1])
    # Refused before anything is written.
    with pytest.raises(NotImplementedError, match="torch.no_grad"):
        call(q.clone().requires_grad_(), cache, cache.clone(), new, new, cache_seqlens=held)
    with pytest.raises(ValueError, match="3 heads of 8"):
        call(torch.randn(2, 1, 3, 8), cache, cache.clone(), new, new, cache_seqlens=held)
    assert torch.equal(cache, before[0])
    with pytest.raises(NotImplementedError, match="float64"):
        call(q.double(), cache.double(), cache.double())
    packed, cu = torch.randn(4, 2, 8), cumulative([1, 3])
    for error, words, arguments in [
        (NotImplementedError, "dropout_p is 0.1", {"dropout_p": 0.1}),
        (ValueError, "at most 2 tokens", {"max_seqlen_q": 2}),
        (TypeError, "max_seqlen_k is a float; give a whole number", {"max_seqlen_k": 2.5}),
        (ValueError, r"k has shape \[4, 2, 8\], but must have 4 dimensions", {"page_table": table}),
        (ValueError, "cu_seqlens_k is missing", {"cu_seqlens_k": None}),
        (TypeError, "cu_seqlens_k holds int64", {"cu_seqlens_k": cu.long()}),
        (ValueError, r"cu_seqlens_k has shape \[2\]", {"cu_seqlens_k": cu[:2]}),
        (ValueError, "uses 4 queries", {"seqused_q": torch.tensor([1, 4], dtype=INT)}),
    ]:
        given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3} | arguments
        with pytest.raises(error, match=words):
            evosdpa.flash_attn_varlen_func(packed, packed, packed, **given)


def test_what_is_missing_is_named():
    q, k, places = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="v is missing; give a Tensor"):
        evosdpa.flash_attn_varlen_func(q, k, None, places, places, 4, 4)
    with pytest.raises(TypeError, match="k_cache is missing"):
        evosdpa.flash_attn_with_kvcache(q[None], None, k[None], cache_seqlens=2)


REFUSED_BEHIND = {
    "scale": {"softmax_scale": float("nan")},
    "softcap": {"softcap": -1.0},
    "chunk": {"attention_chunk": -3},
    "slopes": {"alibi_slopes": torch.ones(3)},
    "slopes of float64": {"alibi_slopes": torch.ones(4, dtype=torch.float64)},
    "sinks": {"s_aux": torch.ones(3)},
    "a gradient": {"s_aux": torch.ones(4, requires_grad=True)},
    "left padding": {"cache_leftpad": torch.tensor([0, 40], dtype=torch.int32)},
    "window": {"window_size": (-5, 0)},
    "queries' places": {"q": torch.randn(2, 4, 16), "cu_seqlens_q": torch.tensor([0, 5, 2], dtype=torch.int32), "max_seqlen_q": 2},
    "an inner stride": {"v_cache": torch.randn(2, 32, 2, 32)[..., ::2]},
    "a cache for more sequences": {"k_cache": torch.randn(3, 32, 2, 16), "v_cache": torch.randn(3, 32, 2, 16)},
    "more sequences, capped": {"k_cache": torch.randn(3, 32, 2, 16), "v_cache": torch.randn(3, 32, 2, 16), "softcap": 2.0},
    "a table for more sequences": {"page_table": torch.tensor([[0], [1], [0]], dtype=torch.int32)},
    "a query's angle": {"q": torch.randn(2, 9, 4, 16), "causal": True, "rotary_cos": torch.ones(25, 8), "rotary_sin": torch.ones(25, 8)},
}


@pytest.mark.parametrize("name", REFUSED_BEHIND)
@pytest.mark.parametrize("kind", ["torch", "NumPy"])
def test_nothing_is_written_where_attention_is_refused(name, kind):
    given = {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 32, 2, 16),
        "v_cache": torch.randn(2, 32, 2, 16),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 16),
        "cache_seqlens": torch.tensor([3, 20], dtype=torch.int32),
        **REFUSED_BEHIND[name],
    }
    if kind == "NumPy":
        if name == "a gradient":
            pytest.skip("NumPy has no gradients")
        given = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    before = given["k_cache"].copy() if kind == "NumPy" else given["k_cache"].clone()
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        evosdpa.flash_attn_with_kvcache(**given)
    assert (given["k_cache"] == before).all()
