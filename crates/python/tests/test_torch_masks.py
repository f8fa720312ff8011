"""Dense masks of torch: computed by evosdpa, with torch's results, types and exceptions."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import evosdpa
from test_torch_patch import alike, counted, drawn

SIZES = (2, 4, 5, 7)
LOWEST = torch.finfo(torch.float32).min


def masks(dtype):
    """Every shape that spreads over the scores, as booleans, as numbers of a type, and as float32."""
    for shape in itertools.product(*((1, size) for size in SIZES)):
        for cut in range(3):
            if all(size == 1 for size in shape[:cut]):
                numbers = torch.randn(shape[cut:], generator=torch.Generator().manual_seed(3))
                yield numbers > -0.3
                yield numbers
                if dtype != torch.float32:
                    yield numbers.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape(monkeypatch, dtype):
    q, k, v = drawn((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 24), dtype=dtype)
    count = 0
    with counted(monkeypatch) as done:
        for mask in masks(dtype):
            alike(lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=0.7))
            count += 1
        assert count > 40 and len(done) == count


def test_every_way_to_lie_in_memory(monkeypatch):
    q, k, v = drawn((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16))
    numbers = torch.randn(2, 4, 5, 7)
    ways = [
        numbers.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        numbers.repeat_interleave(2, 3)[..., ::2],
        torch.randn(3, 5, 6, 20)[:2, :4, :5, 3:10],
        torch.randn(2, 1, 1, 7).expand(2, 4, 5, 7),
        torch.randn(1, 1, 5, 1).expand(2, 4, 5, 7),
        torch.randn(()).expand(5, 7),
        torch.randn(2 * 4 * 5 * 7 + 1)[1:].view(2, 4, 5, 7),
    ]
    with counted(monkeypatch) as done:
        for way in ways:
            for mask in (way, way > -0.3):
                alike(lambda: F.scaled_dot_product_attention(q, k, v, mask))
        assert len(done) == 2 * len(ways)


@pytest.mark.parametrize("queries", [1, 5, 90])
def test_rows_of_every_kind(queries):
    """No key seen, the lowest number everywhere, NaN and infinities."""
    q, k, v = drawn((1, 2, queries, 16), (1, 2, 300, 16), (1, 2, 300, 16))
    for row, at in [
        (-torch.inf, -torch.inf),
        (LOWEST, LOWEST),
        (LOWEST, 0.0),
        (-torch.inf, LOWEST),
        (0.0, torch.nan),
        (0.0, torch.inf),
        (0.0, -LOWEST),
        (-torch.inf, torch.nan),
    ]:
        mask = torch.zeros(queries, 300)
        mask[-1] = row
        mask[-1, 70] = at
        alike(lambda: F.scaled_dot_product_attention(q, k, v, mask))
        if at != torch.inf:  # there torch has a NaN for float32, and zeros for others
            alike(lambda: F.scaled_dot_product_attention(q.half(), k.half(), v.half(), mask))
    hidden = torch.rand(queries, 300) < 0.5
    hidden[-1] = False
    alike(lambda: F.scaled_dot_product_attention(q, k, v, hidden))
    assert (evosdpa.sdpa(q, k, v, hidden)[:, :, -1] == 0).all()


def test_other_calls(monkeypatch):
    q, k, v = drawn((2, 4, 20, 16), (2, 2, 28, 16), (2, 2, 28, 16))
    seen, bias = torch.rand(2, 1, 20, 28) < 0.7, torch.randn(1, 4, 1, 28)
    by_head, for_all = torch.randn(4, 20, 20), torch.rand(20, 20) < 0.7
    with counted(monkeypatch) as done:
        for mask in (seen, bias):
            alike(lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
        for mask in (by_head, for_all):
            alike(lambda: F.scaled_dot_product_attention(q[0], q[1], q[1], mask))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            alike(lambda: F.scaled_dot_product_attention(q, q, q, by_head))
        learned = torch.nn.Parameter(torch.randn(20, 20))
        with torch.no_grad():
            alike(lambda: F.scaled_dot_product_attention(q, q, q, learned))
        assert len(done) == 6
        alike(lambda: F.scaled_dot_product_attention(q, q, q, learned))
        assert len(done) == 6, "a gradient is torch's"


def test_a_mask_of_three_dimensions_leaves_a_contiguous_output(monkeypatch):
    q, k, v = (x.transpose(1, 2) for x in drawn((2, 33, 4, 16), (2, 65, 4, 16), (2, 65, 4, 16)))
    with counted(monkeypatch) as done:
        for mask in (torch.randn(4, 33, 65), torch.randn(1, 33, 1), torch.rand(4, 1, 65) < 0.7):
            alike(lambda: F.scaled_dot_product_attention(q, k, v, mask))
        assert len(done) == 3


def test_no_forward_gradient_of_a_mask_is_lost():
    """torch has none for its attention on a CPU, and says so."""
    q, k, v = drawn((2, 4, 33, 16), (2, 4, 65, 16), (2, 4, 65, 16))
    mask = torch.randn(33, 65)

    def tangent_of(attention):
        return torch.func.jvp(lambda mask: attention(q, k, v, mask), (mask,), (mask,))[1]

    alike(lambda: tangent_of(lambda *given: F.scaled_dot_product_attention(*given)))
    with pytest.raises(NotImplementedError, match="requires grad"):
        tangent_of(evosdpa.sdpa)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(mask, mask)
        alike(lambda: F.scaled_dot_product_attention(q, k, v, dual))
        with pytest.raises(NotImplementedError, match="requires grad"):
            evosdpa.sdpa(q, k, v, dual)


def test_wrong_masks_are_torchs():
    q, k, v = drawn((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16))
    wrong = [
        torch.randn(5, 7).double(),
        torch.randn(5, 7).half(),
        torch.ones(5, 7, dtype=torch.int64),
        torch.randn(5, 6),
        torch.randn(3, 1, 5, 7),
        torch.randn(1, 2, 4, 5, 7),
        torch.randn(7),
        torch.randn(()),
        torch.randn(5, 0),
        torch.randn(5, 7).to_sparse(),
        [[0.0]],
    ]
    for mask in wrong:
        alike(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    mask = torch.randn(5, 7)
    alike(lambda: F.scaled_dot_product_attention(q, k, v, mask, is_causal=True))
    alike(lambda: F.scaled_dot_product_attention(q[0], k[0], v[0], mask[None, None]))
    alike(lambda: F.scaled_dot_product_attention(q, k[0], v, mask))


def test_direct_calls_name_what_is_wrong():
    q, k, v = drawn((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16))
    for mask, kind, words in [
        (torch.randn(5, 7).double(), TypeError, "float64.*float32"),
        (torch.randn(5, 6), ValueError, r"\[5, 6\].*\[2, 4, 5, 7\]"),
        (torch.randn(5, 7).to("meta"), ValueError, "on meta"),
        (torch.randn(5, 7, requires_grad=True), NotImplementedError, "no_grad"),
        ([[0.0]], TypeError, "attn_mask is a list"),
    ]:
        with pytest.raises(kind, match=words):
            evosdpa.sdpa(q, k, v, mask)
    row = torch.randn(7)
    torch.testing.assert_close(evosdpa.sdpa(q, k, v, row), F.scaled_dot_product_attention(q, k, v, row.expand(5, 7)))
