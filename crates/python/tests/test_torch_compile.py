"""The operator: opcheck, torch.compile, torch.export, tracing."""

import pytest
import torch
import torch.nn.functional as F

import evosdpa


def test_opcheck():
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 24)
    for window in [(-1, -1, False), (-1, 0, True)]:
        for by_sequence in (False, True):
            for with_lse in (False, True):
                arguments = (q, k, v, None, *window, by_sequence, with_lse)
                torch.library.opcheck(torch.ops.evosdpa.forward.default, arguments)


def test_opcheck_notices_a_wrong_fake():
    """The check above can fail: an operator with a wrong fake implementation does."""
    library = torch.library.Library("evosdpa_wrong", "DEF")
    library.define("forward(Tensor q) -> Tensor")
    library.impl("forward", lambda q: q.clone(), "CPU")
    torch.library.register_fake("evosdpa_wrong::forward", lambda q: q.new_empty(1), lib=library)
    with pytest.raises(Exception):
        torch.library.opcheck(torch.ops.evosdpa_wrong.forward.default, (torch.randn(3),))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(dynamic):
    def layer(x):
        q, k, v = (2 * x + 1).unflatten(-1, (3, 4, 16)).unbind(2)
        one = evosdpa.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        two, lse = evosdpa.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_lse=True)
        return (one.transpose(1, 2) + two).flatten(2), lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (7, 12):
        x = torch.randn(2, length, 192)
        with torch.no_grad():
            for ours, wanted in zip(compiled(x), layer(x)):
                torch.testing.assert_close(ours, wanted)


def test_inductor():
    """The compiler that people use. The graph is the operator alone, so that nothing has to go through a C++ compiler."""
    compiled = torch.compile(lambda q, k, v: evosdpa.sdpa(q, k, v, is_causal=True), fullgraph=True)
    packed = torch.randn(1, 16, 3, 2, 32)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = compiled(q, k, v)
    assert out.stride() == evosdpa.sdpa(q, k, v, is_causal=True).stride()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return evosdpa.sdpa(q, k, v, is_causal=True)

    q, k, v = (torch.randn(2, 4, 10, 16) for _ in range(3))
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Layer(), (q, k, v), dynamic_shapes=({2: length},) * 3)
    assert any("evosdpa.forward" in str(node.target) for node in program.graph.nodes)
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    torch.testing.assert_close(program.module()(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_jit_tracing_keeps_the_call():
    """A trace must not hold the example's answer."""
    x, y = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    traced = torch.jit.trace(lambda x: evosdpa.sdpa(x, x, x), (x,), check_trace=False)
    torch.testing.assert_close(traced(y), F.scaled_dot_product_attention(y, y, y))


def test_gradients_are_refused_not_wrong():
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, _ = torch.ops.evosdpa.forward(x, x, x, None, -1, -1, False, False, False)
    with pytest.raises(NotImplementedError, match="forward pass alone"):
        out.sum().backward()


def test_dense_masks():
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    compiled = torch.compile(evosdpa.sdpa, backend="aot_eager", fullgraph=True)
    for mask in (torch.rand(5, 7) < 0.7, torch.randn(2, 1, 5, 1)):
        torch.testing.assert_close(compiled(q, k, v, mask), evosdpa.sdpa(q, k, v, mask), rtol=0, atol=0)
