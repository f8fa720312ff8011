"""A model of transformers with attn_implementation="evosdpa"."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import evosdpa
import evosdpa.transformers  # noqa: E402


def model(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config).eval()


def calls_of(monkeypatch):
    """How often evosdpa itself computes."""
    count = [0]
    straight = evosdpa._torch.straight

    def counting(*arguments):
        done = straight(*arguments)
        count[0] += done is not None
        return done

    monkeypatch.setattr(evosdpa._torch, "straight", counting)
    return count


@torch.no_grad()
def test_logits_are_those_of_sdpa(monkeypatch):
    tokens = torch.randint(0, 128, (2, 33))
    wanted = model("sdpa")(tokens).logits
    count = calls_of(monkeypatch)
    torch.testing.assert_close(model("evosdpa")(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
    assert count[0] == 2, "one call a layer"


@torch.no_grad()
def test_padding_is_left_to_sdpa(monkeypatch):
    tokens = torch.randint(0, 128, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    wanted = model("sdpa")(tokens, attention_mask=mask).logits
    count = calls_of(monkeypatch)
    torch.testing.assert_close(model("evosdpa")(tokens, attention_mask=mask).logits, wanted, rtol=1e-4, atol=1e-4)
    assert count[0] == 0


@torch.no_grad()
def test_generation_is_the_same(monkeypatch):
    tokens = torch.randint(0, 128, (1, 5))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model("sdpa").generate(tokens, **settings)
    count = calls_of(monkeypatch)
    assert model("evosdpa").generate(tokens, **settings).tolist() == wanted.tolist()
    assert count[0] == 16, "two layers, eight steps"


def test_training_is_left_to_sdpa():
    tokens = torch.randint(0, 128, (1, 6))
    learner = model("evosdpa").train()
    learner(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in learner.parameters())
