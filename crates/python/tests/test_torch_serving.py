"""Packed sequences and caches against plain torch."""

import functools
import pathlib
import re

import numpy
import pytest
import torch

import evosdpa
import reference
from reference import close, cumulative

INT = torch.int32


ARGUMENTS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 1)}, {"window": (3, 1)}),
    ({"causal": True, "window_size": [5, 5], "softmax_scale": 0.3}, {"causal": True, "window": (5, 5), "scale": 0.3}),
    ({"softcap": 1.5, "causal": True}, {"softcap": 1.5, "causal": True}),
    ({"attention_chunk": 4, "causal": True}, {"chunk": 4, "causal": True}),
    ({"alibi_slopes": torch.tensor([0.5, 0.1, 0.7, 0.02])}, {"slopes": torch.tensor([0.5, 0.1, 0.7, 0.02])}),
    ({"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
]


def test_sinks_without_keys():
    """Who sees no key sees the sink."""
    q, k, sinks = torch.ones(2, 5, 4, 16), torch.ones(2, 0, 2, 16), torch.arange(4.0)
    for out, lse in (
        evosdpa.flash_attn_func(q, k, k, s_aux=sinks, return_lse=True),
        evosdpa.flash_attn_with_kvcache(q, k, k, s_aux=sinks, cache_seqlens=0, return_softmax_lse=True),
    ):
        assert not out.any() and torch.equal(lse, sinks[None, :, None].expand(2, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ours,theirs", ARGUMENTS)
def test_varlen(ours, theirs, dtype):
    lengths_q, lengths_k = [3, 0, 7, 1, 12], [5, 4, 7, 0, 9]
    q, k, v = torch.randn(23, 4, 16, dtype=dtype), torch.randn(25, 2, 16, dtype=dtype), torch.randn(25, 2, 24, dtype=dtype)
    cu = cumulative(lengths_q), cumulative(lengths_k), 12, 9
    out, lse = evosdpa.flash_attn_varlen_func(q, k, v, *cu, **ours, return_softmax_lse=True)
    wanted, wanted_lse = reference.varlen(q, k, v, lengths_q, lengths_k, **theirs)
    assert out.shape == (23, 4, 24) and out.dtype == dtype and out.is_contiguous() and lse.shape == (4, 23)
    close(out, wanted)
    close(lse, wanted_lse)
    assert torch.equal(evosdpa.flash_attn_varlen_func(q, k, v, *cu, **ours), out)


@pytest.mark.parametrize("ours,theirs", ARGUMENTS)
def test_equal_lengths(ours, theirs):
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 24)
    out, lse = evosdpa.flash_attn_func(q, k, v, **ours, return_softmax_lse=True)
    learning = q.clone().requires_grad_()
    plain, plain_lse = evosdpa.flash_attn_func(learning, k, v, **ours, return_attn_probs=True, fallback=True)
    assert plain.requires_grad and out.is_contiguous()
    for b in range(2):
        wanted, wanted_lse = reference.attention(q[b], k[b], v[b], **theirs)
        for mine, lses in ((out, lse), (plain.detach(), plain_lse.detach())):
            close(mine[b], wanted)
            close(lses[b], wanted_lse)


def test_varlen_with_unused_tails():
    lengths_q, lengths_k, used_q, used_k = [4, 6, 5], [8, 3, 9], [2, 6, 0], [8, 1, 5]
    q, k, v = (torch.randn(n, h, 8) for n, h in ((17, 2), (20, 2), (20, 2)))
    for b, (start, room) in enumerate(zip([0, 8, 11], lengths_k)):
        k[start + used_k[b] : start + room] = torch.nan
        v[start + used_k[b] : start + room] = torch.nan
    q[2:4] = q[15:] = torch.nan
    used = {"seqused_q": torch.tensor(used_q, dtype=INT), "seqused_k": torch.tensor(used_k, dtype=INT)}
    cu = cumulative(lengths_q), cumulative(lengths_k)
    out, lse = evosdpa.flash_attn_varlen_func(q, k, v, *cu, 6, 9, **used, causal=True, return_attn_probs=True)
    wanted, wanted_lse = reference.varlen(q, k, v, lengths_q, lengths_k, used_q, used_k, causal=True)
    close(out, wanted)
    close(lse, wanted_lse)


@pytest.mark.parametrize("used", [None, [9, 0, 6]])
def test_packed_queries_over_keys_that_are_not(used):
    lengths = [3, 0, 5]
    q, k, v, cu = torch.randn(8, 4, 16), torch.randn(3, 9, 2, 16), torch.randn(3, 9, 2, 24), cumulative(lengths)
    counts = {} if used is None else {"seqused_k": torch.tensor(used, dtype=INT)}
    held = [9, 9, 9] if used is None else used
    k[1, held[1] :] = torch.nan
    out, lse = evosdpa.flash_attn_varlen_func(q, k, v, cu, None, 5, 9, **counts, causal=True, return_lse=True)
    wanted = [reference.attention(part, k[b, : held[b]], v[b, : held[b]], causal=True) for b, part in enumerate(q.split(lengths))]
    close(out, torch.cat([part for part, _ in wanted]))
    close(lse, torch.cat([part for _, part in wanted], dim=1))
    assert torch.equal(evosdpa.flash_attn_varlen_func(q, k, v, cu, **counts, causal=True), out)
    arrays = [x.numpy() for x in (q, k, v, cu)]
    counts = {name: count.numpy() for name, count in counts.items()}
    close(torch.as_tensor(evosdpa.flash_attn_varlen_func(*arrays, **counts, causal=True)), out.double())
    with pytest.raises(ValueError, match="K has shape .*2, 2, 9, 16.* needs .*3, 2, 9, 16"):
        evosdpa.flash_attn_varlen_func(q, k[:2], v[:2], cu, None, 5, 9, causal=True)
    with pytest.raises(ValueError, match="k has shape .* must have 3 dimensions"):
        evosdpa.flash_attn_varlen_func(q, k, v, cu, cu, 5, 9)


def test_varlen_corner_cases():
    q = torch.randn(4, 2, 8)
    none = torch.zeros(0, 2, 8)
    # No keys at all, no sequences at all, nothing at all.
    out, lse = evosdpa.flash_attn_varlen_func(q, none, none, cumulative([1, 3]), cumulative([0, 0]), 3, 0, return_softmax_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert (evosdpa.flash_attn_varlen_func(q, q, q, cumulative([]), cumulative([]), 0, 0) == 0).all()
    assert evosdpa.flash_attn_varlen_func(none, none, none, cumulative([0]), cumulative([0]), 0, 0).shape == (0, 2, 8)
    # The longest lengths may be left out.
    cu = cumulative([1, 3])
    assert torch.equal(evosdpa.flash_attn_varlen_func(q, q, q, cu, cu), evosdpa.flash_attn_varlen_func(q, q, q, cu, cu, 3, 3))
    # Strided tensors, as a fused projection gives them.
    packed = torch.randn(4, 3, 2, 8)
    fused = evosdpa.flash_attn_varlen_func(*packed.unbind(1), cu, cu, 3, 3)
    assert torch.equal(fused, evosdpa.flash_attn_varlen_func(*(x.contiguous() for x in packed.unbind(1)), cu, cu, 3, 3))


def test_who_belongs_to_no_sequence_sees_no_sink():
    q, none, sinks = torch.randn(3, 2, 8), torch.zeros(0, 2, 8), torch.ones(2)
    for lengths in ([], [2]):
        cu = cumulative(lengths)
        for lib in (torch.as_tensor, numpy.asarray):
            tensors = [lib(x) for x in (q, none, none, cu, cumulative([0] * len(lengths)))]
            _, lse = evosdpa.flash_attn_varlen_func(*tensors, 2, 0, s_aux=lib(sinks), return_softmax_lse=True)
            assert lse.tolist() == [[1.0] * sum(lengths) + [-torch.inf] * (3 - sum(lengths))] * 2


def test_slopes_that_are_the_same_for_every_sequence():
    """FlashAttention-2 takes slopes of heads, or of sequences and heads."""
    slopes, q, k = torch.rand(4), torch.randn(3, 5, 4, 16), torch.randn(3, 9, 2, 16)
    cu = cumulative([5, 5, 5]), cumulative([9, 9, 9]), 5, 9
    for lib in (torch.as_tensor, numpy.asarray):
        tensors = [lib(x) for x in (q, k, k)]
        flat = [lib(x.flatten(0, 1)) for x in (q, k, k)]
        calls = [
            functools.partial(evosdpa.flash_attn_func, *tensors),
            functools.partial(evosdpa.flash_attn_varlen_func, *flat, *(lib(x) if hasattr(x, "dtype") else x for x in cu)),
            functools.partial(evosdpa.flash_attn_with_kvcache, *tensors),
        ]
        expanded = slopes.expand(3, 4) if lib is torch.as_tensor else numpy.broadcast_to(slopes.numpy(), (3, 4))
        for call in calls:
            wanted = call(alibi_slopes=lib(slopes))
            assert (call(alibi_slopes=expanded) == wanted).all() and (call(alibi_slopes=expanded[:1]) == wanted).all()
            for other in (lib(slopes.repeat(3, 1)), expanded[:2]):
                with pytest.raises(NotImplementedError, match=rf"alibi_slopes has shape \[{len(other)}, 4\]: .* give \[4\]"):
                    call(alibi_slopes=other)


def test_names_of_flash_attention_4():
    q, k, sinks = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(4)
    flat, cu = [x.flatten(0, 1) for x in (q, k, k)], (cumulative([5, 5]), cumulative([9, 9]), 5, 9)
    for call in (functools.partial(evosdpa.flash_attn_func, q, k, k), functools.partial(evosdpa.flash_attn_varlen_func, *flat, *cu)):
        out, lse = call(learnable_sink=sinks, return_lse=True, window_size=(3, None))
        wanted, wanted_lse = call(s_aux=sinks, return_softmax_lse=True, window_size=(3, -1))
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and not torch.equal(out, call(window_size=(3, None)))
        with pytest.raises(ValueError, match="s_aux and learnable_sink are both given"):
            call(s_aux=sinks, learnable_sink=sinks)


def test_windows_of_any_width():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
    whole = evosdpa.flash_attn_func(q, k, k)
    for window in [(2**63 - 1, 2**63 - 1), (None, None), (numpy.int64(8), None), torch.tensor([9, 5])]:
        assert torch.equal(evosdpa.flash_attn_func(q, k, k, window_size=window), whole), window
        assert torch.equal(evosdpa.flash_attn_with_kvcache(q, k, k, window_size=window), whole), window
    with pytest.raises(ValueError, match="value head dimension is 0"):
        evosdpa.flash_attn_func(q, k, k[..., :0], return_lse=True)
    for shape in (q[0], q[0, 0], q[None]):
        with pytest.raises(ValueError, match=r"use 4 \(batch, sequence, heads, head dimension\)$"):
            evosdpa.flash_attn_func(shape, shape, shape, fallback=True)


def test_rows_that_are_not_contiguous_are_copied():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    wide = [torch.stack([x, x + 1], dim=-1)[..., 0] for x in (q, k, v)]
    lengths = cumulative([2, 1]), cumulative([3, 2]), 2, 3
    sinks = torch.stack([torch.arange(4.0)] * 2, dim=-1)[:, 0]
    for arguments in ({}, {"softcap": 2.0}, {"s_aux": sinks}):
        wanted = evosdpa.flash_attn_func(q, k, v, **{name: x.clone() if name == "s_aux" else x for name, x in arguments.items()})
        assert torch.equal(evosdpa.flash_attn_func(*wide, **arguments), wanted)
    packed = evosdpa.flash_attn_varlen_func(q[0], k[0], v[0], *lengths)
    assert torch.equal(evosdpa.flash_attn_varlen_func(*(x[0] for x in wide), *lengths), packed)
    caches = [torch.zeros(4, 2, 9, 2, 8)[i] for i in range(4)]
    steps = [evosdpa.flash_attn_with_kvcache(tensors[0], *cache, *tensors[1:], cache_seqlens=numpy.int64(1)) for tensors, cache in (((q, k, v), caches[:2]), (wide, caches[2:]))]
    assert torch.equal(*steps) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window_size": (3, 5)}, {"attention_chunk": 4}])
def test_queries_advance_under_every_mask(asked):
    """Without one all are at the first position, as FlashAttention-3 has it."""
    q, new, cache = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 9, 2, 8)
    angles = torch.rand(9, 4) * 6.28
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    out = evosdpa.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, cache_seqlens=4, **turn, **asked)
    steps = torch.arange(3)
    turned = lambda x, positions: reference.rotated(x, angles.cos(), angles.sin(), positions, False)  # noqa: E731
    k, v = torch.cat([cache[0, :4], turned(new[0], 4 + steps)]), torch.cat([cache[0, :4], new[0]])
    meant = {"causal": asked.get("causal", False), "window": asked.get("window_size", (-1, -1)), "chunk": asked.get("attention_chunk", 0)}
    close(out[0], reference.attention(turned(q[0], 4 + steps * bool(asked)), k, v, **meant)[0])


@pytest.mark.parametrize("lib", [torch.as_tensor, numpy.asarray])
def test_a_cache_takes_nothing_and_gives_nothing(lib):
    """No new token, no query, no sequence: each is an empty step of a server."""
    q, cache, new = torch.randn(2, 1, 4, 8), torch.zeros(2, 5, 2, 8), torch.randn(2, 1, 2, 8)
    angles, held = torch.ones(5, 4), torch.tensor([1, 3], dtype=INT)
    k_cache, v_cache = lib(cache), lib(cache.clone())
    turn = {"rotary_cos": lib(angles), "rotary_sin": lib(angles)}
    step = lambda q, k, b=2, **more: evosdpa.flash_attn_with_kvcache(  # noqa: E731
        lib(q), k_cache[:b], v_cache[:b], lib(k), lib(k), cache_seqlens=lib(held)[:b], **more
    )
    assert step(q[:, :0], new).shape == (2, 0, 4, 8)
    assert (k_cache[0, 1] == lib(new)[0, 0]).all() and (v_cache[1, 3] == lib(new)[1, 0]).all()
    before = torch.as_tensor(k_cache).clone()
    assert step(q[:, :0], new[:, :0], **turn).shape == (2, 0, 4, 8)
    assert step(q[:0], new[:0], 0).shape == (0, 1, 4, 8)
    assert step(q, new[:, :0], **turn).shape == (2, 1, 4, 8)
    assert torch.equal(torch.as_tensor(k_cache), before)
    with pytest.raises(ValueError, match="sequence 1 holds 5 tokens and gets 1 more"):
        evosdpa.flash_attn_with_kvcache(lib(q[:, :0]), k_cache, v_cache, lib(new), lib(new), cache_seqlens=lib(held + 2))


class Cache:
    """A cache of random tokens, in pages or not, with garbage wherever no sequence has a token."""

    def __init__(self, rows, room, heads, dim, dim_v, page, dtype):
        self.page = page
        self.table = None
        if page:
            count = -(-room // page)
            order = torch.randperm(rows * count + 3)[: rows * count]
            self.table = order.reshape(rows, count).to(INT)
            shape = (rows * count + 3, page, heads)
        else:
            shape = (rows, room, heads)
        self.k, self.v = (torch.full((*shape, d), torch.nan, dtype=dtype) for d in (dim, dim_v))

    def place(self, row, position):
        if self.page:
            return int(self.table[row, position // self.page]), position % self.page
        return row, position

    def put(self, row, start, k, v):
        for i in range(k.size(0)):
            place = self.place(row, start + i)
            self.k[place], self.v[place] = k[i], v[i]

    def read(self, row, start, end):
        places = [self.place(row, i) for i in range(start, end)]
        pick = lambda x: torch.stack([x[place] for place in places]) if places else x[0, :0]
        return pick(self.k), pick(self.v)


@pytest.mark.parametrize("page", [0, 1, 4, 16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("new", [None, "same", "packed"])
@pytest.mark.parametrize("extras", [False, True])
def test_kvcache(page, packed, new, extras):
    """Append, rotary, left padding, batch indices, packed queries, in every combination that matters."""
    torch.manual_seed(page + 31 * packed)
    batch, rows, room, heads, heads_kv, dim, dim_v = 3, 5, 24, 4, 2, 16, 16
    for causal, interleaved, half in [(True, True, 8), (False, False, 4), (True, False, 8), (True, True, 0)]:
        dtype = torch.float32 if half else torch.bfloat16
        cache = Cache(rows, room, heads_kv, dim, dim_v, page, dtype)
        held = [7, 0, 13]
        index = [4, 0, 2] if extras else [0, 1, 2]
        pad = [2, 0, 5] if extras else [0, 0, 0]
        for b in range(batch):
            count = held[b]
            cache.put(index[b], pad[b], *(torch.randn(count - pad[b], heads_kv, d, dtype=dtype) for d in (dim, dim_v)))
        lengths_q = [3, 2, 1] if packed else [2] * batch
        q = torch.randn(sum(lengths_q), heads, dim, dtype=dtype)
        lengths_new = [0] * batch if new is None else [2, 5, 0] if new == "packed" else [4] * batch
        k, v = (torch.randn(sum(lengths_new), heads_kv, d, dtype=dtype) for d in (dim, dim_v))
        angles = torch.rand(40, max(half, 1)) * 6.28
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        rotary_first = [1, 9, 3] if extras and interleaved else held
        arguments = {"cache_seqlens": torch.tensor(held, dtype=INT), "causal": causal, "return_softmax_lse": True}
        if page:
            arguments["page_table" if extras else "block_table"] = cache.table if extras else cache.table[:batch]
        if extras:
            arguments |= {"cache_batch_idx": torch.tensor(index, dtype=INT), "cache_leftpad": torch.tensor(pad, dtype=INT)}
        if packed:
            arguments |= {"cu_seqlens_q": cumulative(lengths_q), "max_seqlen_q": 3}
        if new is not None:
            shape = (batch, 4, heads_kv) if new == "same" else (len(k), heads_kv)
            arguments |= {"k": k.reshape(*shape, dim), "v": v.reshape(*shape, dim_v)}
            if new == "packed":
                arguments["cu_seqlens_k_new"] = cumulative(lengths_new)
            if half:
                arguments |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
                if rotary_first is not held:
                    arguments["rotary_seqlens"] = torch.tensor(rotary_first, dtype=INT)
        # A contiguous cache has as many rows as there are sequences, unless they are indexed.
        caches = (cache.k, cache.v) if extras or page else (cache.k[:batch], cache.v[:batch])
        before = [x.clone() for x in caches]
        out, lse = evosdpa.flash_attn_with_kvcache(q if packed else q.reshape(batch, 2, heads, dim), *caches, **arguments)
        after = [x.clone() for x in caches]
        # What it should have been, from what was there before.
        cache.k[: before[0].size(0)], cache.v[: before[1].size(0)] = before
        start_q = start_new = 0
        for b in range(batch):
            rows_q, rows_new = slice(start_q, start_q + lengths_q[b]), slice(start_new, start_new + lengths_new[b])
            start_q, start_new = rows_q.stop, rows_new.stop
            one_q, one_k = q[rows_q], k[rows_new]
            if half and new is not None:
                first = rotary_first[b]
                one_k = reference.rotated(one_k, cos, sin, first + torch.arange(lengths_new[b]), interleaved)
                step = torch.arange(lengths_q[b]) if causal else torch.zeros(lengths_q[b], dtype=torch.int64)
                one_q = reference.rotated(one_q, cos, sin, first + step, interleaved)
            cache.put(index[b], held[b], one_k, v[rows_new])
            keys = cache.read(index[b], pad[b], held[b] + lengths_new[b])
            wanted, wanted_lse = reference.attention(one_q, *keys, causal=causal)
            mine = (out[rows_q], lse[:, rows_q]) if packed else (out[b], lse[b])
            close(mine[0], wanted)
            close(mine[1], wanted_lse)
        for ours, theirs in zip(after, (cache.k, cache.v)):
            torch.testing.assert_close(ours, theirs[: ours.size(0)], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_one_native_call_and_the_long_way_agree(monkeypatch):
    """Plain tensors take one native call; whatever it does not take gets the same bits by the long way."""
    torch.manual_seed(7)
    short, taken = evosdpa._native.straight_cache, []

    def counted(*given):
        done = short(*given)
        taken.append(done is not None)
        return done

    angles = torch.randn(40, 4), torch.randn(40, 4)
    held, padding, rows = torch.tensor([5, 0], dtype=INT), torch.tensor([2, 0], dtype=INT), torch.tensor([1, 0], dtype=INT)
    cache = torch.randn(2, 16, 2, 16), torch.randn(2, 16, 2, 24)
    pages, table = (torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 24)), torch.tensor([[8, 1, 2, 5], [0, 7, 3, 4]], dtype=INT)
    new = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 24)
    joined = torch.randn(4, 2, 16), torch.randn(4, 2, 24)
    q = torch.randn(2, 3, 4, 16)
    tokens = torch.randn(2, 4, 6, 16).permute(0, 2, 1, 3)[0]  # packed queries, not contiguous
    turn = {"rotary_cos": angles[0], "rotary_sin": angles[1]}
    cases = [
        (q, cache, None, {}),
        (q, cache, None, {"cache_seqlens": held, "cache_leftpad": padding, "cache_batch_idx": rows, "return_softmax_lse": True}),
        (q, cache, new, {"cache_seqlens": held, "causal": True, **turn}),
        (q, cache, new, {"cache_seqlens": held, **turn, "rotary_interleaved": False, "rotary_seqlens": padding}),
        (q, pages, new, {"cache_seqlens": held, "page_table": table, "cache_batch_idx": rows, "window_size": (4, 1)}),
        (q, pages, joined, {"cache_seqlens": held, "block_table": table, "cu_seqlens_k_new": cumulative([1, 3]), **turn}),
        (tokens, pages, new, {"cache_seqlens": held, "page_table": table, "cu_seqlens_q": cumulative([4, 1]), "max_seqlen_q": 4, "causal": True, **turn}),
    ]
    for queries, (k_cache, v_cache), added, named in cases:
        results = []
        for way in (counted, lambda *given: None):
            monkeypatch.setattr(evosdpa._native, "straight_cache", way)
            caches = k_cache.clone(), v_cache.clone()
            out = evosdpa.flash_attn_with_kvcache(queries, *caches, *(added or ()), **named)
            out = out if isinstance(out, tuple) else (out,)
            assert all(x.is_contiguous() for x in out)
            results.append((*out, *caches))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), named.keys()
    x = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    cu, used = cumulative([5, 0, 3]), {"seqused_q": torch.tensor([4, 0, 3], dtype=INT), "seqused_k": torch.tensor([2, 0, 3], dtype=INT)}
    for named in ({}, {"causal": True, "softmax_scale": 0.5}, used):
        results = []
        for way in (counted, lambda *given: None):
            monkeypatch.setattr(evosdpa._native, "straight_cache", way)
            results.append(evosdpa.flash_attn_varlen_func(*x, cu, cu, 5, 5, **named))
        assert torch.equal(*results), named.keys()
    assert len(taken) == 10 and all(taken), taken


def test_kvcache_without_lengths_and_with_a_number():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    whole = evosdpa.flash_attn_with_kvcache(q, k, v, causal=True)
    torch.testing.assert_close(whole, evosdpa.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True))
    some, lse = evosdpa.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, window_size=(2, -1), return_softmax_lse=True)
    for b in range(2):
        wanted, wanted_lse = reference.attention(q[b], k[b, :5], v[b, :5], window=(2, -1))
        close(some[b], wanted)
        close(lse[b], wanted_lse)


def test_numpy_has_the_same_functions():
    q, cache, new = torch.randn(2, 1, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 1, 2, 8)
    arrays = [x.numpy().copy() for x in (q, cache, cache, new, new)]
    angles = torch.rand(6, 4)
    theirs = evosdpa.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=4, causal=True, rotary_cos=angles.cos(), rotary_sin=angles.sin())
    rotary = {"rotary_cos": angles.cos().numpy(), "rotary_sin": angles.sin().numpy()}
    ours = evosdpa.flash_attn_with_kvcache(*arrays, cache_seqlens=4, causal=True, **rotary)
    assert torch.equal(torch.from_numpy(ours), theirs) and torch.equal(torch.from_numpy(arrays[1]), cache)
    for wrong, words in [(numpy.ma.masked_array(arrays[0]), "MaskedArray"), (arrays[0].astype(">f4"), "byte order")]:
        with pytest.raises(TypeError, match=words):
            evosdpa.flash_attn_with_kvcache(wrong, *arrays[1:3], cache_seqlens=4)
    with pytest.raises(TypeError, match="cache_seqlens holds >i4"):
        evosdpa.flash_attn_with_kvcache(*arrays[:3], cache_seqlens=numpy.array([4, 4], ">i4"))
    arrays[1].setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        evosdpa.flash_attn_with_kvcache(*arrays, cache_seqlens=4)


def test_opcheck():
    q, k_cache, v_cache = torch.randn(3, 2, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    new, held = torch.randn(3, 1, 2, 8), torch.tensor([1, 0, 2], dtype=INT)
    index, angles = torch.tensor([3, 0, 1], dtype=INT), torch.rand(6, 4)
    ops = torch.ops.evosdpa
    torch.library.opcheck(ops.append.default, (k_cache, v_cache, new, new, True, held, None, None, index, angles, angles))
    torch.library.opcheck(ops.rotate.default, (q, angles, angles, held, None, True, False))
    side = {"seqused_k": held + 1, "leftpad_k": held, "cache_batch_idx": index}
    heads_first = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    torch.library.opcheck(ops.forward.default, (*heads_first, None, -1, 0, True, True, True), side)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(dynamic):
    def step(q, k_cache, v_cache, k, v, held, table, cos, sin):
        out = evosdpa.flash_attn_with_kvcache(
            2 * q, k_cache, v_cache, k + 1, v, cache_seqlens=held, page_table=table, rotary_cos=cos, rotary_sin=sin, causal=True
        )
        packed = evosdpa.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), held, held, 2, 2, softcap=3.0)
        return out.flatten(2) + 1, packed

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for new in (1, 3):
        q, k, v = torch.randn(3, new, 4, 8), torch.randn(3, new, 2, 8), torch.randn(3, new, 2, 8)
        # As lengths of the cache, and as cumulative ones: [0, 1, 2].
        held = torch.arange(3, dtype=INT)
        table = torch.randperm(9).to(INT).reshape(3, 3)
        angles = torch.rand(9, 4)
        caches = [torch.randn(9, 2, 2, 8) for _ in range(2)]
        copies = [x.clone() for x in caches]
        with torch.no_grad():
            wanted = step(q, *copies, k, v, held, table, angles.cos(), angles.sin()) if new else None
            ours = compiled(q, *caches, k, v, held, table, angles.cos(), angles.sin())
        for mine, theirs in zip((*ours, *caches), (*wanted, *copies)):
            torch.testing.assert_close(mine, theirs)


def test_the_page_of_the_documentation_runs():
    text = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), "serving.md", "exec"), {})


def test_calls_of_one_form_read_their_own_lists():
    """Plans are kept by the forms of tensors: everything else may be another the next time."""
    table = torch.randperm(12).view(2, 6).to(INT)
    pages = [torch.randn(12, 4, 2, 16) for _ in "kv"]
    contiguous = lambda x, t, b, n: x[t[b].long()].flatten(0, 1)[:n]  # noqa: E731
    for lengths, order in (([3, 4], table), ([6, 0], table.flip(0)), ([1, 6], table.flip(1).contiguous())):
        q, k, v = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
        cu = cumulative(lengths)
        out, lse = evosdpa.flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True, return_softmax_lse=True)
        wanted, wanted_lse = reference.varlen(q, k, v, lengths, lengths, causal=True)
        close(out, wanted)
        close(lse, wanted_lse)
        assert out[7:].eq(0).all() and lse[:, 7:].eq(-torch.inf).all()
        q, filled = torch.randn(2, 3, 4, 16), [length + 9 for length in lengths]
        out = evosdpa.flash_attn_with_kvcache(q, *pages, cache_seqlens=torch.tensor(filled, dtype=INT), page_table=order)
        for b in range(2):
            close(out[b], reference.attention(q[b], *(contiguous(x, order, b, filled[b]) for x in pages))[0])


def test_a_plan_is_not_kept_over_a_change_of_invariance():
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 30, 2, 16)
    before = evosdpa.set_batch_invariant(False)
    try:
        out = evosdpa.flash_attn_with_kvcache(q, k, k)
        evosdpa.set_batch_invariant(True)
        assert torch.equal(out, evosdpa.flash_attn_with_kvcache(q, k, k))
    finally:
        evosdpa.set_batch_invariant(before)
