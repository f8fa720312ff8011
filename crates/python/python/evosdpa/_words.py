"""What is said when something is not supported: what it is, and what to use instead."""

from __future__ import annotations

FALLBACK = "or pass fallback=True to let torch compute it"
#: The dimensions of ``sdpa``, and of FlashAttention's functions.
BY_HEAD = "4 (batch, heads, sequence, head dimension), all three tensors as many; sdpa takes 3 without the batch"
BY_TOKEN = "4 (batch, sequence, heads, head dimension)"


def dropout(p: float) -> str:
    return f"dropout_p is {p}: evosdpa has no dropout; use 0.0 (model.eval()), {FALLBACK}"


def mask_dtype(given: object, wanted: object) -> str:
    return f"attn_mask holds {given}; use booleans (False hides a key), float32 or the type of q, {wanted}"


def mask_shape(given: tuple[int, ...], scores: tuple[int, ...]) -> str:
    return f"attn_mask has shape {list(given)}, which does not spread to {list(scores)}, the shape of the scores"


def autograd() -> str:
    return (
        "an input requires grad: evosdpa computes the forward pass alone; use torch.no_grad() or "
        f"torch.inference_mode(), {FALLBACK}"
    )


def element_types(given: object) -> str:
    """What to use in the place of a type that no kernel reads."""
    hint = "; scales give float8_e4m3fn and int8 the range of float8_e5m2, with more bits" if "e5m2" in str(given) else ""
    return f"float32, float16, bfloat16, or for caches with scales float8_e4m3fn, int8 or uint8{hint}"


def dtype(name: object) -> str:
    return f"no kernel for {name}; use float32, float16 or bfloat16, {FALLBACK}"


def dim_on_gpu(dim: int, name: object, largest: int) -> str:
    return f"no CUDA kernel for a head dimension of {dim} of {name}; use at most {largest}, {FALLBACK}"


def device(name: object) -> str:
    return f"no kernel for device {name}; use cpu or cuda, {FALLBACK}"


def subclass(name: str, kind: str) -> str:
    if kind == "MaskedArray":
        return f"{name} is a MaskedArray: hidden elements have no meaning here; use {name}.filled(0.0), and hide keys with a mask"
    return f"{name} is a {kind}, not a plain NumPy array; give numpy.asarray({name}) if its memory is all it means"


def layout(name: object) -> str:
    return f"a tensor is {name}; use plain tensors (torch.strided) with memory of their own, {FALLBACK}"


def argument(name: str) -> str:
    instead = '"eager"' if name == "output_attentions" else '"eager" or "sdpa"'  # torch's own has no weights to give either
    return (
        f"a model passes {name!r} to its attention, which evosdpa does not know and must not leave out; load it with "
        f"attn_implementation={instead}"
    )


def own_classes(table: str, names: list[str]) -> str:
    patched = '; with "sdpa" inside evosdpa.patch() it runs on evosdpa' if "sdpa" in names else ""
    return (
        f"{table} has attention layers that ask no registry: evosdpa cannot stand in for them; load the model with "
        f"attn_implementation={' or '.join(map(repr, names))}{patched}"
    )


def across_rows(name: str, batch: int, length: int) -> str:
    return (
        f"{name} does not say where each of {batch} rows of {length} tokens ends: with more than one row every sequence must lie within "
        "one; lay all tokens in one row"
    )


def eager_alone(model: str) -> str:
    return (
        f"{model} says that it has eager attention alone, and works with neither sdpa, FlashAttention nor FlexAttention: evosdpa "
        'cannot stand in for it; load the model with attn_implementation="eager", or one of several parts with a name for each, as in '
        '{"text_config": "evosdpa", "audio_config": "eager"}'
    )


def paged(refusal: str | None) -> str:
    why = "position biases or types that differ" if refusal is None else without_fallback(refusal)
    return f'evosdpa does not compute continuous batching for this model ({why}); load it with attn_implementation="sdpa"'


def block_mask() -> str:
    return (
        "attention_mask is a BlockMask, which evosdpa takes without dropout, gradients and caches of its own; load the model with "
        'attn_implementation="flex_attention"'
    )


def vmap(name: str) -> str:
    return f"torch.vmap of a call with {name} is not supported; give the batch itself"


def number_with_gradient() -> str:
    return "a scale or softcap is a tensor that requires grad: evosdpa takes a number; multiply q with it, or pass its item()"


def dimensions(count: int, layout: str = BY_HEAD) -> str:
    return f"tensors have {count} dimensions; use {layout}"


def heads(heads_q: int, heads_kv: int) -> str:
    return f"{heads_q} query heads and {heads_kv} key/value heads; pass enable_gqa=True to share them"


def mask_twice() -> str:
    return "attn_mask and is_causal are both given; use one of them"


def torch_is_missing(words: str) -> str:
    """The same where a fallback was asked for."""
    return words.replace(FALLBACK, "or have torch, to which fallback=True would leave it")


def without_fallback(words: str) -> str:
    """The same for functions that have no fallback."""
    return words.removesuffix(f", {FALLBACK}")


def is_high(precision: str) -> bool:
    """What a call asks for by ``precision``."""
    if precision not in ("default", "high"):
        raise ValueError(f"precision is {precision!r}; use 'default' or 'high'")
    return precision == "high"
