"""Packed sequences in models of transformers: as a collator packs them, and by continuous batching."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import evosdpa
import evosdpa.transformers  # noqa: E402
import transformers_table as table  # noqa: E402


def model(implementation, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, attn_implementation=implementation, **changes)
    return transformers.LlamaForCausalLM(config).eval()


def counted(monkeypatch):
    """Calls of the function for packed sequences."""
    calls, before = [], evosdpa._packed.flash_attn_varlen_func
    monkeypatch.setattr(evosdpa._packed, "flash_attn_varlen_func", lambda *given, **named: calls.append(1) or before(*given, **named))
    return calls


@torch.no_grad()
def test_cumulative_lengths(monkeypatch):
    calls, parts = counted(monkeypatch), [torch.randint(1, 128, (1, length)) for length in (7, 1, 12)]
    ours = model("evosdpa")
    wanted = torch.cat([model("sdpa")(part).logits for part in parts], dim=1)
    cu = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    positions = torch.cat([torch.arange(part.size(1)) for part in parts])[None]
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    # Positions that begin again are a mask for transformers; without them only the lengths say it. Rotary embedding is relative.
    for given in ({"position_ids": positions}, {}):
        packed = ours(torch.cat(parts, dim=1), **lengths, **given).logits
        torch.testing.assert_close(packed, wanted, rtol=1e-4, atol=1e-4)
    assert calls
    # The lengths are not decoration.
    assert not torch.allclose(ours(torch.cat(parts, dim=1)).logits, wanted, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5"])
def test_lengths_hold_in_several_rows(name):
    """The tokens of all rows count one behind the other, as for flash attention."""
    q, k = torch.randn(2, 4, 10, 8), torch.randn(2, 2, 10, 8)
    cu = torch.tensor([0, 4, 10, 13, 20], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    extra = {"llama": {}, "gpt_oss": {"s_aux": torch.randn(4)}, "t5": {"position_bias": torch.randn(1, 4, 10, 10)}}[name]
    attend = evosdpa.transformers.evosdpa_attention_forward
    ours, _ = attend(torch.nn.Module(), q, k, k, None, is_causal=True, **lengths, **extra)
    for row, (first, last) in ((0, (0, 4)), (0, (4, 10)), (1, (0, 3)), (1, (3, 10))):
        cut = {name: x[..., first:last, first:last] if x.dim() == 4 else x for name, x in extra.items()}
        x, y = q[row : row + 1, :, first:last], k[row : row + 1, :, first:last]
        wanted = evosdpa._plain.scored(x, y, y, None, True, cut.get("position_bias"), None, cut.get("s_aux"), 0.0)
        torch.testing.assert_close(ours[row : row + 1, first:last].transpose(1, 2), wanted, rtol=1e-4, atol=1e-4)
    for wrong in ([0, 4, 13, 20], [0, 10, 19]):
        wrong = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="^cu_seq_lens_q does not say where each of 2 rows of 10 tokens ends"):
            attend(torch.nn.Module(), q, k, k, None, is_causal=True, **{**lengths, "cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong})


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4_text"])
def test_lengths_hold_in_layers_with_windows(name):
    """Windows, chunks, sinks and softcaps within each sequence; with gradients and compiled as well, where torch computes."""
    _, ours = table.built(name)
    parts = [torch.randint(3, 64, (1, length)) for length in (9, 5, 10)]
    cu, tokens = torch.tensor([0, 9, 14, 24], dtype=torch.int32), torch.cat(parts, dim=1)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 10, "max_length_k": 10}
    places = {"use_cache": False, "position_ids": torch.cat([torch.arange(part.size(1)) for part in parts])[None]}
    with torch.no_grad():
        # For transformers chunks count from the first token of all.
        alone = [ours(tokens, **places).logits] if name == "llama4_text" else [ours(part).logits for part in parts]
        wanted = torch.cat(alone, dim=1)
    ours.set_attn_implementation("evosdpa")
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(ours(tokens, **places, **lengths).logits.detach(), wanted, rtol=1e-3, atol=1e-3)
    if name == "gpt_oss":
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(ours.forward, backend="eager")(tokens, **places, **lengths).logits
        torch.testing.assert_close(compiled, wanted, rtol=1e-3, atol=1e-3)


def test_continuous_batching(monkeypatch):
    """Requests that come and go in one batch give what each gives alone."""
    prompts = [torch.randint(1, 128, (length,)).tolist() for length in (5, 17, 1, 9)]
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = model("sdpa")
    wanted = [alone.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist() for prompt in prompts]
    calls, ours = counted(monkeypatch), model("evosdpa")
    results = ours.generate_batch(inputs=prompts, generation_config=settings)
    found = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    assert [found[tuple(prompt)] for prompt in prompts] == wanted
    assert calls and ours.config._attn_implementation == "evosdpa"


def test_continuous_batching_that_nothing_computes_is_refused_by_name():
    """Its batches come without a mask: torch would let requests see each other."""
    settings = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model("evosdpa").double().generate_batch(inputs=[[5, 6, 7], [8]], generation_config=settings)
    for result in results.values():
        assert "no kernel for torch.float64; use float32, float16 or bfloat16" in str(result.error)
        assert 'attn_implementation="sdpa"' in str(result.error)
