"""Architectures of transformers with small random weights, each computed by eager attention and by evosdpa.

    python crates/python/tests/transformers_table.py --out results/cpu/transformers.json    # all of them, a few minutes
    python crates/python/tests/transformers_table.py --only llama,gpt_oss

Per architecture: logits with no padding, left and right padding; greedy and beam generation; a static cache; bfloat16 and float16; gradients.
A call is *eligible* when nobody wants its gradient. What is compared are positions that are not padding.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import pathlib
import platform
import sys
import time
import warnings

import torch
import transformers

import evosdpa
import evosdpa.transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, **MOE}
WINDOWED = {"sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
ENCODER = {**TEXT, "type_vocab_size": 2}
SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_channels": 3,
}
AUDIO = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "conv_dim": (16, 16),
    "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
}

#: Kind and what each needs beyond its kind's own.
ARCHITECTURES = {
    **{name: ("causal", {}) for name in """llama qwen2 olmo olmo2 granite stablelm phi phi3 starcoder2 glm glm4 cohere nemotron
        arcee smollm3 seed_oss ernie4_5 apertus diffllama""".split()},
    **{name: ("causal", {"head_dim": 8}) for name in "mistral qwen3 gemma ministral hunyuan_v1_dense helium".split()},
    **{name: ("causal", WINDOWED) for name in "gemma2 gemma3_text cohere2 olmo3 exaone4".split()},
    **{name: ("causal", {**WINDOWED, **MOE}) for name in "flint granitemoe_swa".split()},
    **{name: ("causal", WINDOWED) for name in "granite_swa beam kolibri1".split()},
    "inkling_text": ("causal", {**MOE, "head_dim": 8, "sliding_window": 4}),
    **{name: ("causal", MOE) for name in "mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe dots1".split()},
    **{name: ("causal", {**LATENT, "num_key_value_heads": 4}) for name in "deepseek_v2 deepseek_v3".split()},
    "gpt_oss": ("causal", {**WINDOWED, **MOE}),
    "llama4_text": ("causal", {
        **MOE, "head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "num_experts_per_tok": 1,
    }),
    "gpt2": ("causal", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "gpt_neox": ("causal", {}),
    "gpt_bigcode": ("causal", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "opt": ("causal", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "biogpt": ("causal", {}),
    "mimo_v2_flash": ("causal", {}),
    **{name: ("causal", {**LATENT, "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4})
        for name in "deepseek_v32 glm_moe_dsa axk2".split()},
    **{name: ("encoder", {}) for name in "bert roberta electra camembert xlm-roberta data2vec-text ernie".split()},
    "albert": ("encoder", {"embedding_size": 16}),
    "modernbert": ("encoder", {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "distilbert": ("encoder", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}),
    **{name: ("encoder", {}) for name in "eurobert gte ultrabert".split()},
    **{name: ("seq2seq", SEQ2SEQ) for name in "bart mbart pegasus marian m2m_100 blenderbot".split()},
    "t5": ("seq2seq", T5),
    "umt5": ("seq2seq", T5),
    "whisper": ("speech", {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, "suppress_tokens": None,
        "begin_suppress_tokens": None}),
    **{name: ("vision", {}) for name in "vit deit dinov2 vit_mae siglip_vision_model clip_vision_model ijepa".split()},
    **{name: ("audio", {}) for name in "wav2vec2 hubert unispeech-sat".split()},
}
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "encoder": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "speech": transformers.AutoModelForSpeechSeq2Seq,
    "vision": transformers.AutoModel,
    "audio": transformers.AutoModel,
}
OWN = {"causal": TEXT, "encoder": ENCODER, "vision": VISION, "audio": AUDIO}
TOLERANCE = 2e-4


class Counted:
    """Counts calls of attention that nobody differentiates, and those that evosdpa computes."""

    def __init__(self):
        self.eligible = self.ran = 0

    @contextlib.contextmanager
    def counting(self):
        module = evosdpa.transformers
        straight, computed = module._straight, module._computed

        def counted(query, out):
            if not (torch.is_grad_enabled() and query.requires_grad):
                self.eligible += 1
                self.ran += out is not None

        def count_straight(query, *rest):
            out = straight(query, *rest)
            if out is not None:
                counted(query, out)
            return out

        def count_computed(query, *rest):
            out = computed(query, *rest)
            counted(query, out)
            return out

        module._straight, module._computed = count_straight, count_computed
        try:
            yield self
        finally:
            module._straight, module._computed = straight, computed


def built(name):
    """A model whose scores differ enough from each other that a wrong mask shows."""
    kind, overrides = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **{**OWN.get(kind, {}), **overrides})
    for rate in ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "activation_dropout"):
        if isinstance(getattr(config, rate, None), float):
            setattr(config, rate, 0.0)
    torch.manual_seed(0)
    model = AUTO[kind].from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.5 * weight[0].numel() ** -0.5)
            elif "sinks" in label:
                weight.normal_()
    return kind, model


def inputs_of(kind, padding=None):
    generator = torch.Generator().manual_seed(1)
    if kind == "vision":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}, None
    if kind == "audio":
        return {"input_values": torch.randn(2, 400, generator=generator)}, None
    if kind == "speech":
        heard = torch.randn(2, 8, 32, generator=generator)
        return {"input_features": heard, "decoder_input_ids": torch.randint(3, 64, (2, 7), generator=generator)}, None
    tokens = torch.randint(3, 64, (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "right":
        mask[0, -4:] = 0
    tokens = torch.where(mask.bool(), tokens, 0)
    given = {"input_ids": tokens, "attention_mask": mask}
    if kind == "seq2seq":
        given["decoder_input_ids"] = torch.randint(3, 64, (2, 7), generator=generator)
        return given, None
    return given, mask.bool()


def answer(model, given, seen):
    out = model(**given)
    logits = out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
    return logits.float() if seen is None else logits.float()[seen]


def generated(model, kind, **settings):
    given, _ = inputs_of(kind, "left" if kind == "causal" else "right" if kind == "seq2seq" else None)
    given.pop("decoder_input_ids", None)
    return model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, **settings)


def gradients(model, given, seen):
    model.zero_grad()
    answer(model, given, seen).square().mean().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def checks_of(kind):
    """Each check is a function of a model; what it returns is compared."""
    checks = {"logits": lambda model: answer(model, *inputs_of(kind))}
    if kind in ("causal", "encoder", "seq2seq"):
        checks["right"] = lambda model: answer(model, *inputs_of(kind, "right"))
        checks["left"] = lambda model: answer(model, *inputs_of(kind, "left"))
    if kind in ("causal", "seq2seq"):
        checks["greedy"] = lambda model: generated(model, kind)
        checks["beam"] = lambda model: generated(model, kind, num_beams=3)
    if kind == "causal":
        checks["static"] = lambda model: generated(model, kind, cache_implementation="static", disable_compile=True)
    checks["gradients"] = lambda model: gradients(model, *inputs_of(kind))
    return checks


def compared(model, check, needs_gradient):
    """What eager attention and evosdpa give, as words, and the calls."""
    count = Counted()

    def run(implementation):
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)  # some models draw what they look at
        with contextlib.nullcontext() if needs_gradient else torch.no_grad():
            return check(model)

    try:
        wanted = run("eager")
    except Exception as error:
        return {"result": f"eager fails: {first_line(error)}"}, count
    try:
        with count.counting():
            ours = run("evosdpa")
    except NotImplementedError as error:
        return {"result": "refused", "why": first_line(error)}, count
    except Exception as error:
        return {"result": f"fails: {first_line(error)}"}, count
    if not wanted.is_floating_point():
        return {"result": "same" if torch.equal(ours, wanted) else "different"}, count
    worst = float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
    return {"result": "same" if worst <= TOLERANCE else "different", "worst": worst}, count


def in_16_bits(model, kind, dtype):
    """FlashAttention's rule: at most twice the error of eager attention in the same type."""
    given, seen = inputs_of(kind)
    count = Counted()
    model = copy.deepcopy(model)
    for part in model.modules():
        if hasattr(part, "index_topk"):
            part.index_topk = given["input_ids"].shape[1]  # rounding would pick other keys, with eager attention too
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = answer(model, given, seen)
        half = model.to(dtype)
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
        try:
            theirs = answer(half, given, seen)
            half.set_attn_implementation("evosdpa")
            with count.counting():
                ours = answer(half, given, seen)
        except NotImplementedError as error:
            return {"result": "refused", "why": first_line(error)}, count
        except Exception as error:
            return {"result": f"fails: {first_line(error)}"}, count
    worst, allowed = float((ours - exact).abs().max()), 2 * float((theirs - exact).abs().max()) + 0.05
    return {"result": "same" if worst <= allowed else "different", "worst": worst, "allowed": allowed}, count


def row_of(name, only=None):
    kind, model = built(name)
    row = {"architecture": name, "kind": kind, "checks": {}, "eligible": 0, "ran": 0}
    for title, check in checks_of(kind).items():
        if only is None or title in only:
            row["checks"][title], count = compared(model, check, title == "gradients")
            row["eligible"] += count.eligible
            row["ran"] += count.ran
    for title, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        if only is None or title in only:
            row["checks"][title], count = in_16_bits(model, kind, dtype)
            row["eligible"] += count.eligible
            row["ran"] += count.ran
    return row


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def table(rows):
    titles = ["logits", "right", "left", "greedy", "beam", "static", "gradients", "bf16", "f16"]
    lines = ["| architecture | " + " | ".join(titles) + " | calls on evosdpa |", "|---|" + "---|" * (len(titles) + 1)]
    for row in rows:
        cells = [row["checks"].get(title, {}).get("result", "") for title in titles]
        cells = [cell if len(cell) < 20 else "n/a" for cell in cells]
        lines.append(f"| {row['architecture']} | " + " | ".join(cells) + f" | {row['ran']} of {row['eligible']} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="architectures, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="where the document goes")
    parser.add_argument("--baseline", action="store_true", help="let evosdpa's plain baseline compute what no fast kernel takes")
    asked = parser.parse_args()
    evosdpa.transformers._FAST = not asked.baseline
    # Models of this size are done before a second thread has begun.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows, failed = [], []
    for name in asked.only.split(",") if asked.only else ARCHITECTURES:
        start = time.time()
        try:
            rows.append(row_of(name))
        except Exception as error:
            failed.append(name)
            print(f"{name}: cannot be built: {first_line(error)}", file=sys.stderr)
            continue
        words = {title: check["result"] for title, check in rows[-1]["checks"].items() if check["result"] != "same"}
        print(f"{name}: {rows[-1]['ran']} of {rows[-1]['eligible']} calls, {words or 'all same'} ({time.time() - start:.1f} s)", file=sys.stderr)
    eligible, ran = sum(row["eligible"] for row in rows), sum(row["ran"] for row in rows)
    environment = {
        "evosdpa": evosdpa.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    document = {"schema": "evosdpa.transformers/1", "environment": environment, "eligible": eligible, "ran": ran, "rows": rows}
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    print(f"\n{ran} of {eligible} calls ran on evosdpa")
    different = [row["architecture"] for row in rows if any(check["result"] == "different" for check in row["checks"].values())]
    return 1 if different or failed else 0


if __name__ == "__main__":
    sys.exit(main())
