"""What comes beside Q, K and V, as torch tensors and as the operator takes it: each arrives, each wrong one is named."""

import pytest
import torch

import evosdpa
from evosdpa import _torch, _window

INT = torch.int32


def attention(q, k, v, scale=None, bias=None, hidden=None, softcap=None, sinks=None):
    """``[heads, queries, dim]`` of one sequence, in float64, hidden keys as booleans."""
    group = q.size(0) // k.size(0)
    q, k, v = q.double(), k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * (q.size(-1) ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.size(1), 1)], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : k.size(1)]
    return weights @ v, lse


def run(q, k, v, side, window=_window.FULL, with_lse=True):
    return _torch.compute(q, k, v, None, window, False, with_lse, False, side)


def close(ours, wanted):
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


def test_modifiers():
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 24)
    bias, mask = torch.randn(2, 1, 5, 7), torch.rand(1, 4, 5, 7) < 0.6
    slopes, sinks = torch.rand(4), torch.randn(4)
    distance = (torch.arange(7)[None, :] - torch.arange(5)[:, None] - 2).abs()
    for b in range(2):
        for side, arguments in [
            ({"bias": bias}, {"bias": bias[b]}),
            ({"bias": bias.half()}, {"bias": bias.half()[b].double()}),
            ({"mask": mask}, {"hidden": ~mask[0]}),
            ({"softcap": 0.7}, {"softcap": 0.7}),
            ({"sinks": sinks}, {"sinks": sinks}),
            ({"alibi_slopes": slopes}, {"bias": -slopes.double()[:, None, None] * distance}),
            ({"softcap": 2.0, "bias": bias, "mask": mask}, {"softcap": 2.0, "bias": bias[b], "hidden": ~mask[0]}),
        ]:
            out, lse = run(q, k, v, side)
            wanted, wanted_lse = attention(q[b], k[b], v[b], **arguments)
            close(out[b], wanted)
            close(lse[b], wanted_lse)


def test_packed_and_paged():
    lengths_q, lengths_k = [3, 0, 5], [4, 6, 9]
    cu_q = torch.tensor([0, 3, 3, 8], dtype=INT)
    cu_k = torch.tensor([0, 4, 10, 19], dtype=INT)
    q, k, v = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 19, 16), torch.randn(1, 2, 19, 16)
    side = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 9}
    packed, lse = run(q, k, v, side)
    # The same keys in pages of 4, in reverse order.
    pages = torch.full((8, 2, 4, 16), torch.nan)
    values = torch.full((8, 2, 4, 16), torch.nan)
    table = torch.full((3, 3), -7, dtype=INT)
    free = 7
    for b, length in enumerate(lengths_k):
        for at in range(0, length, 4):
            count = min(4, length - at)
            pages[free, :, :count] = k[0, :, cu_k[b] + at :][:, :count]
            values[free, :, :count] = v[0, :, cu_k[b] + at :][:, :count]
            table[b, at // 4] = free
            free -= 1
    used = torch.tensor(lengths_k, dtype=INT)
    paged, _ = run(q, pages, values, {**side, "cu_seqlens_k": None, "max_seqlen_k": None, "seqused_k": used, "page_table": table})
    for b, length in enumerate(lengths_q):
        rows = slice(int(cu_q[b]), int(cu_q[b]) + length)
        keys = slice(int(cu_k[b]), int(cu_k[b + 1]))
        wanted, wanted_lse = attention(q[0, :, rows], k[0, :, keys], v[0, :, keys])
        close(packed[0, :, rows], wanted)
        close(paged[0, :, rows], wanted)
        close(lse[0, :, rows], wanted_lse)
    # Tokens of no sequence.
    assert (packed[0, :, 8:] == 0).all() and (lse[0, :, 8:] == -torch.inf).all()


def test_eight_bit_keys():
    q, k, v = torch.randn(2, 4, 3, 32, dtype=torch.bfloat16), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
    codes_k, codes_v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = torch.rand(4) + 0.5
    out, _ = run(q, codes_k, codes_v, {"k_scales": scales, "v_scales": scales})
    assert out.dtype == torch.bfloat16
    for b in range(2):
        each = scales[2 * b : 2 * b + 2, None, None]
        wanted, _ = attention(q[b], codes_k[b].float() * each, codes_v[b].float() * each)
        torch.testing.assert_close(out[b].double(), wanted, rtol=2.0**-7, atol=1e-3)
    one = torch.ones(1)
    codes_q = q.to(torch.float8_e4m3fn)
    out, _ = run(codes_q, codes_k, codes_v, {"q_scales": one, "k_scales": one, "v_scales": one, "scales_per": "tensor"})
    wanted, _ = attention(codes_q[1].float(), codes_k[1].float(), codes_v[1].float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[1].double(), wanted, rtol=2.0**-7, atol=1e-3)


def test_the_operator_takes_the_same():
    q, k, v = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 19, 16), torch.randn(1, 2, 19, 16)
    side = {
        "cu_seqlens_q": torch.tensor([0, 3, 10], dtype=INT),
        "cu_seqlens_k": torch.tensor([0, 4, 19], dtype=INT),
        "max_seqlen_q": 7,
        "max_seqlen_k": 15,
        "softcap": 3.0,
        "sinks": torch.randn(4),
    }
    arguments = (q, k, v, None, -1, 0, True, True, True, False)
    torch.library.opcheck(torch.ops.evosdpa.forward.default, arguments, side)
    out, lse = torch.ops.evosdpa.forward(*arguments, **side)
    ours, ours_lse = _torch.compute(q, k, v, None, (-1, 0, True), True, True, False, side)
    assert torch.equal(out, ours) and torch.equal(lse, ours_lse)


def test_what_is_wrong_is_named():
    x = torch.randn(1, 2, 6, 8)
    cu = torch.tensor([0, 6], dtype=INT)
    packed = {"cu_seqlens_q": cu, "max_seqlen_q": 6}
    table = {"page_table": torch.zeros(1, 1, dtype=INT), "seqused_k": torch.tensor([6], dtype=INT)}
    run(x, x, x, packed)
    run(x, x, x, table)
    for error, words, side in [
        (TypeError, "cu_seqlens_q holds int64", {**packed, "cu_seqlens_q": cu.long()}),
        (TypeError, "cu_seqlens_q is a list", {**packed, "cu_seqlens_q": [0, 6]}),
        (ValueError, r"cu_seqlens_q has shape \[1, 2\]", {**packed, "cu_seqlens_q": cu[None]}),
        (ValueError, "must be contiguous", {**packed, "cu_seqlens_q": torch.tensor([0, 9, 6], dtype=INT)[::2]}),
        (ValueError, "max_seqlen_q", {"cu_seqlens_q": cu}),
        (ValueError, "value 1 is 7", {**packed, "cu_seqlens_q": torch.tensor([0, 7], dtype=INT), "max_seqlen_q": 9}),
        (ValueError, "value 0 is -1", {**packed, "cu_seqlens_q": torch.tensor([-1, 5], dtype=INT)}),
        (ValueError, "at 1, but there are 1 pages", {**table, "page_table": torch.ones(1, 1, dtype=INT)}),
        (ValueError, "at -1, but there are 1 pages", {**table, "page_table": torch.full((1, 1), -1, dtype=INT)}),
        (ValueError, "2 rows, but there are 1", {**table, "page_table": torch.zeros(2, 1, dtype=INT)}),
        (ValueError, "uses 7 keys", {**table, "seqused_k": torch.tensor([7], dtype=INT)}),
        (ValueError, "uses -1 keys", {**table, "seqused_k": torch.tensor([-1], dtype=INT)}),
        (ValueError, "meta", {**packed, "cu_seqlens_q": cu.to("meta")}),
        (ValueError, "bias has shape", {"bias": torch.zeros(1, 2, 6, 5)}),
        (TypeError, "bias holds float64", {"bias": torch.zeros(1, 2, 6, 6, dtype=torch.float64)}),
        (TypeError, "mask holds float32", {"mask": torch.zeros(1, 2, 6, 6)}),
        (ValueError, "sinks: 3 values", {"sinks": torch.zeros(3)}),
        (ValueError, "softcap is -1", {"softcap": -1.0}),
        (ValueError, "granularity", {"scales_per": "hed"}),
        (TypeError, "no side input named 'slope'", {"slope": torch.zeros(2)}),
    ]:
        with pytest.raises(error, match=words):
            run(x, x, x, side)


def test_lists_of_a_gpu_can_be_checked():
    """With EVOSDPA_CHECK=1 they are copied and checked; here they are on a CPU already."""
    x = torch.empty(3, 2, 4, 8, device="meta")
    q = torch.empty(2, 2, 1, 8, device="meta")
    table, used = torch.tensor([[0, 1], [2, 9]], dtype=INT), torch.tensor([5, 3], dtype=INT)
    evosdpa._operator.check_lists(q, x, x, {"page_table": table, "seqused_k": used, "softcap": 3.0})
    for words, side in [
        ("at 9, but there are 3 pages", {"page_table": table, "seqused_k": used + 2}),
        ("uses 9 keys", {"page_table": table, "seqused_k": used + 4}),
        ("uses -1 keys", {"page_table": table, "seqused_k": used - 6}),
    ]:
        with pytest.raises(ValueError, match=words):
            evosdpa._operator.check_lists(q, x, x, side)


def test_numpy_takes_the_same():
    from evosdpa import _arrays

    q, k, v = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 19, 16), torch.randn(1, 2, 19, 16)
    side = {
        "cu_seqlens_q": torch.tensor([0, 3, 9], dtype=INT),
        "cu_seqlens_k": torch.tensor([0, 4, 19], dtype=INT),
        "max_seqlen_q": 7,
        "max_seqlen_k": 15,
        "alibi_slopes": torch.rand(4),
    }
    wanted = run(q, k, v, side)
    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in side.items()}
    ours = _arrays.forward(*(x.numpy() for x in (q, k, v)), None, _window.FULL, True, False, arrays)
    for mine, theirs in zip(ours, wanted):
        assert torch.equal(torch.from_numpy(mine), theirs)
    with pytest.raises(TypeError, match="cu_seqlens_q holds int64"):
        _arrays.forward(*(x.numpy() for x in (q, k, v)), None, _window.FULL, True, False, {**arrays, "cu_seqlens_q": arrays["cu_seqlens_q"].astype("int64")})
