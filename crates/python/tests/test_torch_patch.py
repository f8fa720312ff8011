"""Under ``evosdpa.patch()`` a program's results, types, strides and exceptions are what they were."""

import copy
import fractions
import functools
import inspect
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evosdpa
from patched import ORIGINAL, Q, K, Silent, WORTH, alike, counted, drawn, outcome


def test_plain_calls_are_computed_here(monkeypatch):
    """The comparisons below would all hold if patch() did nothing."""
    q, k, v = drawn((2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16))
    with counted(monkeypatch) as done, evosdpa.patch():
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)
        F.scaled_dot_product_attention(q[0], q[0], q[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.scaled_dot_product_attention(q, q, q)
        assert len(done) == 4


def call(*shapes, dtype=torch.float32, change=lambda q, k, v: (q, k, v), **arguments):
    def work():
        return F.scaled_dot_product_attention(*change(*drawn(*shapes, dtype=dtype)), **arguments)

    return work


def negated(q, k, v):
    return torch._neg_view(q), k, torch._neg_view(v)


def imaginary(q, k, v):
    return torch.complex(k, q).conj().imag, k, v


def unaligned(q, k, v):
    memory = torch.zeros(q.numel() * 4 + 1, dtype=torch.uint8).numpy()
    view = torch.frombuffer(memory, dtype=torch.float32, count=q.numel(), offset=1).view(q.shape)
    return view.copy_(q), k, v


def of_zeros(q, k, v):
    return q, k, torch._efficientzerotensor(v.shape)


def parameters(q, k, v):
    return torch.nn.Parameter(q, requires_grad=False), k, v


def learning(q, k, v):
    return q.requires_grad_(), k, v


CASES = {
    "equal": call(Q, Q, Q),
    "causal": call(Q, K, K, is_causal=True),
    "heads shared": call(Q, (2, 2, 12, 16), (2, 2, 12, 16), enable_gqa=True),
    "heads spread": call(Q, (2, 1, 12, 16), (2, 1, 12, 16)),
    "one head of values": call(Q, (2, 2, 12, 16), (2, 1, 12, 16), enable_gqa=True),
    "heads that do not divide": call(Q, (2, 3, 12, 16), (2, 3, 12, 16), enable_gqa=True),
    "heads that differ": call(Q, (2, 2, 12, 16), (2, 2, 12, 16)),
    "batch spread": call(Q, (1, 4, 12, 16), (1, 4, 12, 16)),
    "value dimension": call(Q, K, (2, 4, 12, 8)),
    "large head dimension": call((1, 2, 5, 600), (1, 2, 5, 600), (1, 2, 5, 600)),
    "three dimensions": call(Q[1:], K[1:], K[1:]),
    "two dimensions": call(Q[2:], K[2:], K[2:]),
    "five dimensions": call((3, *Q), (3, *K), (3, *K)),
    "no keys": call(Q, (2, 4, 0, 16), (2, 4, 0, 16)),
    "no queries": call((2, 4, 0, 16), K, K),
    "no batch": call((0, 4, 9, 16), (0, 4, 9, 16), (0, 4, 9, 16)),
    "no head dimension": call((2, 4, 9, 0), (2, 4, 9, 0), (2, 4, 9, 4)),
    "keys and values differ": call(Q, K, (2, 4, 11, 16)),
    "wrong dimension": call(Q, (2, 4, 12, 8), K),
    "mixed types": call(Q, Q, Q, change=lambda q, k, v: (q, k.half(), v)),
    "float64": call(Q, Q, Q, dtype=torch.float64),
    "integers": call(Q, Q, Q, dtype=torch.int64),
    "bfloat16": call(Q, Q, Q, dtype=torch.bfloat16),
    "meta": call(Q, Q, Q, change=lambda *x: [t.to("meta") for t in x]),
    "lists": call(Q, Q, Q, change=lambda *x: [t.tolist() for t in x]),
    "NumPy": call(Q, Q, Q, change=lambda *x: [t.numpy() for t in x]),
    "boolean mask": call(Q, Q, Q, attn_mask=torch.ones(9, 9, dtype=torch.bool).tril()),
    "float mask": call(Q, Q, Q, attn_mask=drawn((9, 9))[0]),
    "mask and causal": call(Q, Q, Q, attn_mask=torch.ones(9, 9, dtype=torch.bool), is_causal=True),
    "scale NaN": call(Q, Q, Q, scale=float("nan")),
    "scale infinite": call(Q, Q, Q, scale=float("inf")),
    "scale too large for float32": call(Q, Q, Q, scale=1e300),
    "scale zero": call(Q, Q, Q, scale=0.0),
    "scale zero, causal": call(*WORTH, scale=0.0, is_causal=True),
    "scale negative": call(*WORTH, scale=-0.5),
    "scale negative, causal": call(*WORTH, scale=-0.5, is_causal=True),
    "scale huge, causal": call(*WORTH, scale=3e38, is_causal=True),
    "scale tiny": call(*WORTH, scale=1e-45),
    "scale zero in float32, causal": call(*WORTH, scale=1e-320, is_causal=True),
    "scale bool": call(*WORTH, scale=True),
    "scale int": call(Q, Q, Q, scale=1),
    "scale tensor": call(Q, Q, Q, scale=torch.tensor(0.5)),
    "scale learns": call(Q, Q, Q, scale=torch.tensor(0.5, requires_grad=True)),
    "scale text": call(Q, Q, Q, scale="1"),
    "causal int": call(Q, Q, Q, is_causal=1),
    "gqa None": call(Q, Q, Q, enable_gqa=None),
    "dropout all": call(Q, Q, Q, dropout_p=1.0),
    "dropout too large": call(Q, Q, Q, dropout_p=2.0),
    "dropout tensor": call(Q, Q, Q, dropout_p=torch.tensor(0.0)),
    "dropout complex": call(*WORTH, dropout_p=0j),
    "dropout a fraction": call(*WORTH, dropout_p=fractions.Fraction(0)),
    "dropout None": call(Q, Q, Q, dropout_p=None),
    "gradient": call(Q, Q, Q, change=learning),
    "parameter": call(Q, Q, Q, change=parameters),
    "negative bit": call(Q, Q, Q, change=negated),
    "imaginary part": call(Q, Q, Q, change=imaginary),
    "unaligned": call(Q, Q, Q, change=unaligned),
    "zero tensor": call(Q, Q, Q, change=of_zeros),
    "named": call(*WORTH, change=lambda q, k, v: (q.rename("b", "h", "s", "d"), k, v)),
    "inner stride": call((2, 4, 16, 9), Q, Q, change=lambda q, k, v: (q.mT, k, v)),
    "by sequence": call((2, 9, 4, 16), Q, Q, change=lambda q, k, v: (q.transpose(1, 2), k, v)),
    "sequence first": call((9, 2, 4, 16), Q, Q, change=lambda q, k, v: (q.permute(1, 2, 0, 3), k, v)),
    "head first": call((4, 2, 9, 16), Q, Q, change=lambda q, k, v: (q.transpose(0, 1), k, v)),
    "expanded": call((1, 4, 9, 16), Q, Q, change=lambda q, k, v: (q.expand(2, -1, -1, -1), k, v)),
    "sparse": call(Q, Q, Q, change=lambda q, k, v: (q.to_sparse(), k, v)),
    "mask of a list": call(*WORTH, attn_mask=[True]),
    "mask empty of keys": call(*WORTH, attn_mask=torch.zeros(33, 40, dtype=torch.bool)),
    "mask of -inf rows": call(*WORTH, attn_mask=torch.full((33, 40), -torch.inf).index_fill(0, torch.arange(30), 0.0)),
    "mask of one dimension": call(*WORTH, attn_mask=torch.ones(40, dtype=torch.bool)),
    "mask of float64": call(*WORTH, attn_mask=torch.zeros(33, 40, dtype=torch.float64)),
    "mask that learns": call(*WORTH, attn_mask=torch.zeros(33, 40, requires_grad=True)),
    "mask negated": call(*WORTH, attn_mask=torch._neg_view(torch.ones(33, 40))),
    "too many": lambda: F.scaled_dot_product_attention(*drawn(*WORTH), None, 0.0, False, 0.5),
    "too few": lambda: F.scaled_dot_product_attention(*drawn(*WORTH)[:2]) and 0,
    "an unknown name": call(*WORTH, window=3),
    "a name twice": lambda: F.scaled_dot_product_attention(*drawn(*WORTH), query=1),
}

# Each way that a tensor can lie in memory, for queries, keys and values, alone and with what else changes the output's form.
FORMS = {
    "by sequence": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "head first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "head dimension apart": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "one batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "one head": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "one row": lambda x: x[:, :, :1].expand_as(x),
    "one number": lambda x: x[..., :1].expand_as(x),
    "padded": lambda x: F.pad(x, (1, 3))[..., 1:-3],
    "overlapping": lambda x: torch.as_strided(x, x.shape, (7, 5, 3, 1)),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    form = FORMS[name]
    q, k, v = drawn(*WORTH)
    seen = torch.ones(33, 40, dtype=torch.bool).tril(3)
    for given in ((form(q), k, v), (q, form(k), form(v)), (form(q), form(k), form(v))):
        alike(lambda: F.scaled_dot_product_attention(*given, is_causal=True))
        alike(lambda: F.scaled_dot_product_attention(*given, attn_mask=seen))
        alike(lambda: F.scaled_dot_product_attention(*(x[0] for x in given)))
        alike(lambda: F.scaled_dot_product_attention(*(x[0] for x in given), attn_mask=seen))
        alike(lambda: F.scaled_dot_product_attention(*given[:2], given[2][..., :8]))
        alike(lambda: F.scaled_dot_product_attention(given[0], given[1][:, :2], given[2][:, :2], enable_gqa=True))


def test_tensors_whose_head_dimension_lies_apart_are_copied(monkeypatch):
    """None of torch's fast kernels takes them, so that a copy is cheaper; its slow way gives contiguous results."""
    q, k, v = (FORMS["head dimension apart"](x) for x in drawn(*WORTH))
    by_sequence = FORMS["by sequence"](q)
    with counted(monkeypatch) as done, evosdpa.patch():
        assert F.scaled_dot_product_attention(by_sequence, k, v).is_contiguous()
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(33, 40, dtype=torch.bool).tril(3))
        F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
        assert len(done) == 3


def test_more_than_four_dimensions(monkeypatch):
    """Windows of an image, as timm's NesT and Hiera have them."""
    q, k = drawn((2, 3, 4, 33, 16), (2, 3, 4, 40, 16))
    with counted(monkeypatch) as done:
        for given in ((q, k, k), (q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)), (q[None], k[None], k[None, ..., :8])):
            alike(lambda: F.scaled_dot_product_attention(*given))
            alike(lambda: F.scaled_dot_product_attention(*given, is_causal=True, scale=0.3))
        alike(lambda: F.scaled_dot_product_attention(q, k[:, :, :2], k[:, :, :2], enable_gqa=True))
        assert len(done) == 7
    for given in ((q, k[:, :1], k[:, :1]), (q, k[0], k[0]), (q, k, k[..., :1, :]), (q.half(), k, k), (q[:0], k[:0], k[:0])):
        alike(lambda: F.scaled_dot_product_attention(*given))
    alike(lambda: F.scaled_dot_product_attention(q.clone().requires_grad_(), k, k))


def test_one_head_of_keys_is_shared(monkeypatch):
    """As LitGPT's Falcon has it, without ``enable_gqa``: torch spreads it over the queries' heads."""
    q, k, v = drawn(WORTH[0], *((2, 1, 40, 16),) * 2)
    seen = torch.ones(33, 40, dtype=torch.bool).tril(3)
    with counted(monkeypatch) as done:
        for form in (lambda x: x, FORMS["by sequence"], FORMS["head first"]):
            alike(lambda: F.scaled_dot_product_attention(form(q), k, v, is_causal=True))
            alike(lambda: F.scaled_dot_product_attention(form(q), k, v, attn_mask=seen))
            alike(lambda: F.scaled_dot_product_attention(form(q), k, v, enable_gqa=True))
            alike(lambda: F.scaled_dot_product_attention(form(q)[0], k[0], v[0]))
            alike(lambda: F.scaled_dot_product_attention(form(q), k, v[..., :8]))
        assert len(done) == 15


def test_queries_whose_rows_overlap():
    """An output that lies as they do would have no contiguous rows; torch's own, which has, is not written where it is read."""
    q, k, v = drawn(*WORTH)
    q = q.flatten()[:24].unfold(0, 16, 1).expand(2, 4, 9, 16)
    wanted = ORIGINAL(q.contiguous(), k, v)
    torch.testing.assert_close(evosdpa.sdpa(q, k, v), wanted, rtol=1e-4, atol=1e-4)
    with evosdpa.patch():
        ours = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert ours.stride() == ORIGINAL(q, k, v).stride()


def test_small_calls_of_float32_are_torchs_bit_for_bit(monkeypatch):
    """Scores of hundreds, as PyTorch's own tests have them: two correct results differ by more than those tests allow."""
    q, k = (9 * x for x in drawn((4, 4, 3, 8), (4, 4, 6, 8)))
    wanted = ORIGINAL(q, k, k, is_causal=True)
    with counted(monkeypatch) as done, evosdpa.patch():
        assert torch.equal(F.scaled_dot_product_attention(q, k, k, is_causal=True), wanted) and not done
        F.scaled_dot_product_attention(q.half(), k.half(), k.half())
        F.scaled_dot_product_attention(*(x.repeat(1, 1, 4, 1) for x in (q, k, k)))
        assert len(done) == 2
    torch.testing.assert_close(evosdpa.sdpa(q, k, k, is_causal=True), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    alike(CASES[name])


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("queries,keys", [(9, 9), (5, 12), (1, 12), (12, 5)])
def test_causal_biases(variant, queries, keys):
    from torch.nn.attention import bias

    q, k, v = drawn((2, 4, queries, 16), (2, 4, keys, 16), (2, 4, keys, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = getattr(bias, variant)(queries, keys)
    seen = alike(lambda: F.scaled_dot_product_attention(q, k, v, mask))
    assert type(seen) is torch.Tensor
    alike(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True))
    alike(lambda: F.scaled_dot_product_attention(q, k, v, mask, dropout_p=1.0))
    if queries <= keys:
        torch.testing.assert_close(evosdpa.sdpa(q, k, v, mask), seen, rtol=1e-4, atol=1e-4)


def test_autocast():
    q, k, v = drawn(Q, Q, Q)

    def work():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v)

    assert alike(work).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert evosdpa.sdpa(q, k, v).dtype == torch.float16
        alike(lambda: F.scaled_dot_product_attention(q, k.bfloat16(), v))
        alike(lambda: F.scaled_dot_product_attention(q.double(), k.double(), v.double()))


def test_the_function_is_picklable():
    q, k, v = drawn(*WORTH)
    alike(lambda: pickle.loads(pickle.dumps(F.scaled_dot_product_attention))(q, k, v))
    alike(lambda: copy.deepcopy(functools.partial(F.scaled_dot_product_attention, is_causal=True))(q, k, v))


def test_modules():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    x = drawn((2, 9, 16))[0]
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    for training in (False, True):
        layer.train(training)
        encoder.train(training)
        alike(lambda: layer(x, x, x, need_weights=False)[0])
        alike(lambda: layer(x, x, x)[0])
        alike(lambda: encoder(x))
        alike(lambda: encoder(x, src_key_padding_mask=padding))


def test_chosen_backends_are_respected():
    q = drawn(Q, dtype=torch.float32)[0]
    exact = q.bfloat16()
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):

        def work():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(exact, exact, exact)

        theirs, wrong = outcome(work)
        with evosdpa.patch():
            ours, also_wrong = outcome(work)
        assert type(wrong) is type(also_wrong)
        assert wrong is not None or torch.equal(ours, theirs), "bit for bit: the same code ran"


def test_what_a_cpu_does_not_have_is_no_choice(monkeypatch):
    """x-transformers leaves out cuDNN alone, whatever the device."""
    q = drawn(WORTH[0])[0]
    for backends in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        with sdpa_kernel(backends), counted(monkeypatch) as done:
            alike(lambda: F.scaled_dot_product_attention(q, q, q))
            assert len(done) == 1


def test_any_order_and_many_threads():
    first, second = evosdpa.patch(), evosdpa.patch(fallback=False)
    first.__enter__()
    ours = F.scaled_dot_product_attention
    second.__enter__()
    strict = F.scaled_dot_product_attention
    assert len({id(ORIGINAL), id(ours), id(strict)}) == 3
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is strict
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ORIGINAL

    (x,) = drawn(Q)
    wanted, wrong = ORIGINAL(x, x, x), []
    odd = x.as_subclass(Silent)

    def work():
        for _ in range(30):
            with evosdpa.patch():
                for given in (x, odd):
                    if not torch.allclose(F.scaled_dot_product_attention(given, x, x), wanted, atol=1e-5):
                        wrong.append("differs")

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and F.scaled_dot_product_attention is ORIGINAL


def test_it_has_no_signature_where_torchs_has_none():
    """Who makes a table of functions asks for it (PyTorch's own tests of torch.fx do)."""
    alike(lambda: str(inspect.signature(F.scaled_dot_product_attention)))



def test_kept_by_a_class():
    """torch's own is a builtin, which is no method."""
    (x,) = drawn(WORTH[0])

    def work():
        class Layer(torch.nn.Module):
            attention = F.scaled_dot_product_attention

            def forward(self, x):
                return self.attention(x, x, x, is_causal=True)

        torch._dynamo.reset()
        return Layer()(x), torch.compile(Layer(), backend="aot_eager", fullgraph=True)(x)

    alike(work)


def test_a_table_made_meanwhile():
    """Who overrides torch's functions may have kept them while ours stood there, and looks torch's own up."""
    (x,) = drawn(WORTH[0])

    def work():
        class Tabled(torch.Tensor):
            TABLE = {F.scaled_dot_product_attention: lambda *given, **named: "from the table"}

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func in cls.TABLE:
                    return cls.TABLE[func](*args, **(kwargs or {}))
                return super().__torch_function__(func, types, args, kwargs or {})

        names = torch.overrides.resolve_name(F.scaled_dot_product_attention), F.scaled_dot_product_attention.__name__
        return F.scaled_dot_product_attention(x.as_subclass(Tabled), x, x), names

    assert alike(work)[0] == "from the table"


def test_a_name_kept_is_torchs_afterwards():
    x = drawn(Q)[0].bfloat16()
    with evosdpa.patch():
        from torch.nn.functional import scaled_dot_product_attention as kept
    assert torch.equal(kept(x, x, x), ORIGINAL(x, x, x))


def test_another_librarys_patch_stays(monkeypatch):
    (x,) = drawn(Q)
    with monkeypatch.context() as theirs:
        theirs.setattr(F, "scaled_dot_product_attention", lambda *given, **named: "theirs")
        with evosdpa.patch():
            assert F.scaled_dot_product_attention(x, x, x) != "theirs"
            assert F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) == "theirs", "the fallback is what was there"
        assert F.scaled_dot_product_attention(x, x, x) == "theirs"
    with evosdpa.patch():
        mine = F.scaled_dot_product_attention
        theirs = lambda *given, **named: mine(*given, **named)  # noqa: E731
        F.scaled_dot_product_attention = theirs
    try:
        assert F.scaled_dot_product_attention is theirs, "not ours to take away"
        assert torch.equal(theirs(x.half(), x.half(), x.half()), ORIGINAL(x.half(), x.half(), x.half()))
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_scale_with_a_gradient_is_refused():
    (x,) = drawn(Q)
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match="requires grad"):
        evosdpa.sdpa(x, x, x, scale=scale)
    with pytest.raises(TypeError, match="requires grad"):
        evosdpa.flash_attn_func(x, x, x, softmax_scale=scale)
    assert torch.equal(evosdpa.sdpa(x, x, x, scale=scale.detach()), evosdpa.sdpa(x, x, x, scale=0.5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_direct_calls_of_odd_tensors():
    q, k, v = drawn(Q, Q, Q)
    wanted = ORIGINAL(-q, k, -v)
    torch.testing.assert_close(evosdpa.sdpa(*negated(q, k, v)), wanted, rtol=1e-4, atol=1e-4)
    flash = evosdpa.flash_attn_func(*(x.transpose(1, 2) for x in negated(q, k, v))).transpose(1, 2)
    torch.testing.assert_close(flash, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="zeros without memory"):
        evosdpa.sdpa(*of_zeros(q, k, v))
    with pytest.raises(NotImplementedError, match="nested"):
        x = torch.nested.nested_tensor([q[0], q[1]])
        evosdpa.sdpa(x, x, x)
