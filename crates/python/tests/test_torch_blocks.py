"""Block masks of FlexAttention against torch's own meaning of them."""

import pytest
import torch
import torch.nn.functional as F

import evosdpa

flex = pytest.importorskip("torch.nn.attention.flex_attention")


def tensors(batch, heads, queries, keys, dim=32):
    torch.manual_seed(queries + keys)
    return [torch.randn(batch, heads, length, dim) for length in (queries, keys, keys)]


def expected(q, k, v, visible):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return torch.where(visible.any(-1, keepdim=True), out, 0)


def visible_of(mask, queries, keys):
    """What a block mask shows, by the words of its documentation."""
    batch, heads, rows, columns = mask.kv_indices.shape
    seen = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    dense = flex.create_mask(mask.mask_mod, batch, heads, queries, keys, device="cpu")
    (bq, bk) = mask.BLOCK_SIZE
    lists = [(mask.kv_num_blocks, mask.kv_indices, dense)]
    if mask.full_kv_num_blocks is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(dense)))
    for counts, indices, shown in lists:
        for at in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(rows)).tolist():
            b, h, row = at
            for column in indices[b, h, row, : counts[b, h, row]].tolist():
                block = (b, h, slice(row * bq, (row + 1) * bq), slice(column * bk, (column + 1) * bk))
                seen[block] = shown[block]
    return seen


MODS = {
    "window": lambda b, h, q, k: (q - k).abs() <= 40,
    "by head": lambda b, h, q, k: (q // 64 + k // 64 + h) % 3 != 0,
    "by sequence": lambda b, h, q, k: (q // 128 + k // 128 + b) % 2 == 0,
    "nothing for some": lambda b, h, q, k: (q >= 128) & (k < q),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("size", [64, (128, 64), 96])
def test_what_it_shows_is_what_counts(mod, size):
    q, k, v = tensors(2, 4, 200, 330)
    mask = flex.create_block_mask(MODS[mod], 2, 4, 200, 330, device="cpu", BLOCK_SIZE=size)
    wanted = expected(q, k, v, visible_of(mask, 200, 330))
    for _ in range(2):  # worked out, and as it was kept
        torch.testing.assert_close(evosdpa.sdpa(q, k, v, attn_mask=mask), wanted, atol=2e-5, rtol=1e-4)


def test_lists_of_blocks_need_no_function():
    q, k, v = tensors(2, 2, 256, 256)
    counts = torch.tensor([[[1, 2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 3, 1, 2], [2, 0, 1, 3], [0, 1, 2, 3], [3, 0, 1, 2]]]], dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    visible = visible_of(mask, 256, 256)
    assert visible.sum() == 4 * 64 * 64
    assert "mask" not in evosdpa._blocks.beside(mask, q, k)
    torch.testing.assert_close(evosdpa.sdpa(q, k, v, attn_mask=mask), expected(q, k, v, visible), atol=2e-5, rtol=1e-4)
    causal = visible & torch.ones(256, 256, dtype=torch.bool).tril()
    out = evosdpa.sdpa(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(out, expected(q, k, v, causal), atol=2e-5, rtol=1e-4)
    # The same blocks as full ones, whose function is not asked.
    full = flex.BlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q < 0
    )
    torch.testing.assert_close(evosdpa.sdpa(q, k, v, attn_mask=full), expected(q, k, v, visible), atol=2e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused_by_name():
    q, k, v = tensors(2, 2, 200, 200)
    for sizes, text in [((1, 1, 256, 200), "make it for these"), ((3, 1, 200, 200), "a batch of 3"), ((1, 4, 200, 200), "4 heads")]:
        mask = flex.create_block_mask(MODS["window"], *sizes, device="cpu")
        with pytest.raises(ValueError, match=text):
            evosdpa.sdpa(q, k, v, attn_mask=mask)
    mask = flex.create_block_mask(MODS["window"], 1, 1, 200, 200, device="cpu")
    with pytest.raises(TypeError):
        evosdpa.sdpa(q, k, v, attn_mask=mask, fallback=True)  # torch's own word
