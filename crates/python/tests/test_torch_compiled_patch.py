"""Compiled and exported programs under ``evosdpa.patch()`` are what they were: strides, sizes that are not known, transforms."""

import io

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

import evosdpa
from patched import ORIGINAL, WORTH, alike, drawn


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.mark.parametrize("dim_v", [16, 8])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_outputs_lie_as_torchs_do(order, dim_v):
    """A view that torch's output allows is an error of others."""
    q, k, v = drawn(*WORTH)
    q = q.permute(order).contiguous().permute(*(order.index(dim) for dim in range(4)))
    attention = compiled(lambda: F.scaled_dot_product_attention(q, k, v[..., :dim_v], is_causal=True))
    out = alike(attention)
    if dim_v == 16:
        assert out.permute(order).is_contiguous()
        alike(compiled(lambda: F.scaled_dot_product_attention(q, k, v).permute(order).view(-1)))
    alike(compiled(lambda: F.scaled_dot_product_attention(q[0], k[0], v[0])))
    alike(compiled(lambda: F.scaled_dot_product_attention(q, k, v, torch.ones(4, 33, 40, dtype=torch.bool).tril())))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_data_say():
    q, k, v = drawn(*WORTH)
    seen = torch.arange(40) % 3 > 0
    bias = drawn((33, 40))[0]

    def picked(q, k, v, seen):
        return F.scaled_dot_product_attention(q, k[:, :, seen], v[:, :, seen])

    def with_a_mask(q, k, v, seen):
        return F.scaled_dot_product_attention(q, k[:, :, seen], v[:, :, seen], bias[:, seen])

    alike(lambda: compiled(picked)(q, k, v, seen))
    alike(lambda: compiled(with_a_mask)(q, k, v, seen))

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def of_any_batch():
        given = [x.clone() for x in (q, k, v)]
        for x in given:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        return compiled(attention)(*given)

    alike(of_any_batch)


def test_transforms():
    q, k, v = drawn((3, *WORTH[0]), (3, *WORTH[1]), (3, *WORTH[2]))
    bias = drawn((3, 33, 40))[0]
    alike(lambda: compiled(torch.vmap(F.scaled_dot_product_attention))(q, k, v, bias))
    alike(lambda: compiled(torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)))(q, k, v))


def test_no_forward_gradient_is_lost():
    """Neither by a compiled program nor by the operator itself: it would be zero."""
    q = drawn(WORTH[0])[0]
    operator = lambda x: torch.ops.evosdpa.forward(x, x, x, None, -1, -1, False, False, False)[0]  # noqa: E731
    for function in (operator, lambda x: evosdpa.sdpa(x, x, x)):
        with pytest.raises(NotImplementedError, match="requires grad"):
            torch.func.jvp(function, (q,), (q,))
        with pytest.raises(Exception, match="requires grad"):
            compiled(lambda x: torch.func.jvp(function, (x,), (x,)))(q)
    with pytest.raises(NotImplementedError, match="requires grad"):
        torch.func.grad(lambda x: operator(x).sum())(q)
    with evosdpa.patch(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, tangent = torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (q,), (q,))
    with evosdpa.patch():
        try:
            _, ours = compiled(lambda x: torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (x,), (x,)))(q)
        except torch._dynamo.exc.Unsupported:
            return  # as without evosdpa: torch's own fused attention has no such gradient
    torch.testing.assert_close(ours, tangent, rtol=1e-4, atol=1e-4)


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch before 2.7 does not say that it exports")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_need_no_evosdpa(strict):
    given = tuple(drawn(*WORTH))

    def exported():
        program = torch.export.export(Layer(), given, strict=strict)
        torch.export.save(program, io.BytesIO())
        return [str(node.target) for node in program.graph.nodes], program.module()(*given)

    names, out = alike(exported)
    assert "aten.scaled_dot_product_attention.default" in names
    torch.testing.assert_close(out, ORIGINAL(*given, is_causal=True))
