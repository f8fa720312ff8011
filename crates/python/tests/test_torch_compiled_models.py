"""Models of transformers that torch compiles whole: padded batches, static caches, position biases, softcap and sinks are computed here."""

import pytest
import torch
import torch._dynamo

transformers = pytest.importorskip("transformers")

import evosdpa.transformers  # noqa: E402
import transformers_table as table  # noqa: E402
from transformers import StaticCache  # noqa: E402


@pytest.fixture
def computed(monkeypatch):
    """Calls that evosdpa computes; it is an error if torch is to compute one."""

    def refused(*given, **named):
        raise AssertionError("left to torch")

    forward, calls = evosdpa._native.forward, []
    monkeypatch.setattr(evosdpa._native, "forward", lambda *given: (calls.append(given), forward(*given))[1])
    monkeypatch.setattr(evosdpa.transformers, "sdpa_attention_forward", refused)
    monkeypatch.setattr(evosdpa._plain, "scored", refused)
    return calls


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True, **options)


@torch.no_grad()
@pytest.mark.parametrize(("name", "padding", "dynamic"), [("llama", "left", True), ("gpt_oss", "left", False), ("t5", "right", False)])
def test_padded_batches(name, padding, dynamic, computed):
    kind, model = table.built(name)
    given, seen = table.inputs_of(kind, padding)
    wanted = table.answer(model, given, seen)
    model.set_attn_implementation("evosdpa")
    ours = table.answer(compiled(model, dynamic=dynamic), given, seen)
    torch.testing.assert_close(ours, wanted, rtol=2e-4, atol=2e-4)
    assert len(computed) >= 2, "each layer's"


@torch.no_grad()
def test_static_caches(computed):
    """With a window and a softcap as well."""
    _, model = table.built("gemma2")
    given, _ = table.inputs_of("causal", "left")
    tokens, there = given["input_ids"], given["attention_mask"]
    results = []
    for implementation in ("eager", "evosdpa"):
        model.set_attn_implementation(implementation)
        call = model if implementation == "eager" else compiled(model)
        cache = StaticCache(config=model.config, max_cache_len=20)
        steps = []
        for first, last in ((0, 8), (8, 9)):
            places = torch.arange(first, last)[None].expand(2, -1)
            out = call(tokens[:, first:last], attention_mask=there[:, :last], past_key_values=cache, position_ids=places)
            steps.append(out.logits[there[:, first:last].bool()])
        results.append(torch.cat(steps))
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-4)
    assert len(computed) == 2 * model.config.num_hidden_layers


def test_gradients_stay_torchs(monkeypatch):
    _, model = table.built("llama")
    given, seen = table.inputs_of("causal", "left")
    wanted = table.gradients(model, given, seen)
    model.set_attn_implementation("evosdpa")
    monkeypatch.setattr(evosdpa._native, "forward", None)
    torch.testing.assert_close(table.gradients(compiled(model), given, seen), wanted, rtol=2e-4, atol=2e-4)
