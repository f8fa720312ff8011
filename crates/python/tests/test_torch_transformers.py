"""Models of transformers with attn_implementation="evosdpa"."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import evosdpa.transformers  # noqa: E402
import transformers_table as table  # noqa: E402
from evosdpa import _deferred  # noqa: E402
from transformers import masking_utils  # noqa: E402

NEW = int(transformers.__version__.split(".")[0]) >= 5


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def baseline(monkeypatch):
    """Everything that a call can say is computed by evosdpa, by its plain baseline where nothing else takes it."""
    monkeypatch.setattr(evosdpa.transformers, "_FAST", False)


#: A model of each kind of mask and modifier, and whether the versions before 5 call the registry for it.
SAMPLE = {
    "llama": True,
    "gpt_oss": True,
    "gemma2": True,
    "gemma3_text": True,
    "llama4_text": True,
    "bart": True,
    "vit": True,
    "bert": False,
    "t5": False,
    "modernbert": False,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_models_compute_what_they_did(name, baseline):
    row = table.row_of(name)
    assert {check["result"] for check in row["checks"].values()} == {"same"}, row
    if NEW or SAMPLE[name]:
        assert row["ran"] == row["eligible"] > 0, "every call was computed here"


def test_models_compute_what_they_did_by_default():
    """What no fast kernel takes goes to torch, softcap, sinks and biases included."""
    for name in ("gpt_oss", "gemma2", "llama"):
        row = table.row_of(name, only=("logits", "left", "greedy"))
        assert {check["result"] for check in row["checks"].values()} == {"same"}, row


@pytest.mark.parametrize("left_out", ["seqused_k", "leftpad_k", "mask", "chunk", "window", "softcap", "sinks", "bias"])
def test_the_comparison_notices_what_is_left_out(left_out, baseline, monkeypatch):
    attend = evosdpa._torch.attend

    def forgetful(q, k, v, scale, window, by_sequence, with_lse, high, side=None):
        window = (-1, window[1], window[2]) if left_out == "window" else window
        side = {name: value for name, value in (side or {}).items() if name != left_out}
        return attend(q, k, v, scale, window, by_sequence, with_lse, high, side or None)

    monkeypatch.setattr(evosdpa._torch, "attend", forgetful)
    monkeypatch.setattr(evosdpa._torch, "straight", lambda *given: None)
    monkeypatch.setattr(evosdpa._native, "straight_cache", lambda *given: None)
    name, check = {
        "seqused_k": ("bert", "right"),
        "leftpad_k": ("llama", "left"),
        "mask": ("llama4_text", "left"),
        "chunk": ("llama4_text", "logits"),
        "window": ("gemma3_text", "logits"),
        "softcap": ("gemma2", "logits"),
        "sinks": ("gpt_oss", "logits"),
        "bias": ("t5", "logits"),
    }[left_out]
    if name == "t5" and not NEW:
        pytest.skip("T5 does not call the registry in this version")
    if left_out == "seqused_k" and not NEW:
        pytest.skip("encoders get dense masks in this version")
    if left_out == "softcap":
        # Scores that a cap of 50 would leave alone show nothing.
        monkeypatch.setitem(table.ARCHITECTURES, name, ("causal", {**table.WINDOWED, "attn_logit_softcapping": 0.5}))
    row = table.row_of(name, only=(check,))
    assert row["checks"][check]["result"] == "different", row


@torch.no_grad()
def test_masks_are_not_written_out(baseline, monkeypatch):
    _, model = table.built("gemma3_text")
    model.set_attn_implementation("evosdpa")
    monkeypatch.setattr(_deferred.DeferredMask, "dense", lambda self: pytest.fail("the mask was written out"))
    for padding in ("left", "right"):
        model(**table.inputs_of("causal", padding)[0])
    for cache in ("static", "dynamic"):
        table.generated(model, "causal", cache_implementation=cache, disable_compile=True)


@torch.no_grad()
def test_a_profiler_sees_modifiers_too():
    _, model = table.built("gemma2")
    given, seen = table.inputs_of("causal", "left")
    wanted = table.answer(model, given, seen)
    model.set_attn_implementation("evosdpa")
    with torch.profiler.profile() as profile:
        ours = table.answer(model, given, seen)
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    assert any(event.name == "evosdpa::forward" for event in profile.events())


def layer(**arguments):
    module = torch.nn.Module()
    q = torch.randn(1, 4, 5, 8)
    return evosdpa.transformers.evosdpa_attention_forward(module, q, q[:, :2], q[:, :2], None, **arguments)


def test_unknown_arguments_are_refused_by_name():
    for name in ("indices", "block_indices", "something_new", "cache_scales"):  # indices of an unknown form
        with pytest.raises(NotImplementedError, match=f"'{name}'"):
            layer(**{name: torch.zeros(1)})
        layer(**{name: None})
    with pytest.raises(NotImplementedError, match="'output_attentions'.*attn_implementation=\"eager\"$"):
        layer(output_attentions=True)
    layer(output_attentions=False, sliding_window=3, position_ids=torch.arange(5)[None], use_cache=True)
    layer(pixel_values=torch.zeros(1, 3, 4, 4), image_position_ids=torch.zeros(1, 4, 2), mm_token_type_ids=torch.zeros(1, 5))  # DiffusionGemma's layers get the image
    layer(input_ids=torch.arange(5)[None])  # GLM-5-Next's layers get the tokens for their experts
    with pytest.raises(NotImplementedError, match="'indices'"):
        layer(indices=torch.zeros(1, 5, 2, dtype=torch.long), cache=object())


def test_models_with_layers_of_their_own_are_refused_by_name():
    own = r"FALCON_ATTENTION_CLASSES has attention layers that ask no registry.*'sdpa'.*evosdpa\.patch\(\)"
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=own):
            transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(**small), attn_implementation="evosdpa")


def test_models_with_eager_attention_alone_are_refused_by_name():
    small = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    with pytest.raises(ValueError, match=r'^BloomForCausalLM says.*eager attention alone.*attn_implementation="eager", or'):
        transformers.AutoModelForCausalLM.from_config(transformers.BloomConfig(**small), attn_implementation="evosdpa")


def column_by_column(x):
    return x.mT.contiguous().mT


def test_heads_that_lie_column_by_column(monkeypatch):
    """As a convolution leaves keys and values (Inkling)."""
    monkeypatch.setattr(evosdpa.transformers, "sdpa_attention_forward", lambda *given, **named: pytest.fail("torch computed it"))
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    bias = torch.randn(1, 4, 9, 9)
    for extra in ({}, {"position_bias": bias}, {"softcap": 3.0}):
        with monkeypatch.context() as only:
            only.setattr(evosdpa._plain, "scored", lambda *given: pytest.fail("torch computed it"))
            ours, _ = evosdpa.transformers.evosdpa_attention_forward(
                torch.nn.Module(), q, column_by_column(k), column_by_column(k), None, is_causal=True, **extra
            )
        wanted = evosdpa._plain.scored(q, k, k, None, True, extra.get("position_bias"), extra.get("softcap"), None, 0.0)
        torch.testing.assert_close(ours.transpose(1, 2), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not NEW, reason="no such models before 5")
def test_sparse_models():
    row = table.row_of("deepseek_v32", only=("logits", "left", "greedy"))
    assert {check["result"] for check in row["checks"].values()} == {"same"}, row
    assert row["ran"] == row["eligible"] > 0


def test_picked_keys():
    q = torch.randn(2, 4, 5, 8)
    picks = torch.tensor([[[0, -1], [0, 1], [2, 1], [3, 0], [1, 4]]]).expand(2, -1, -1)
    picked = torch.zeros(2, 5, 6, dtype=torch.bool).scatter(-1, picks % 6, True)[:, None, :, :5]
    causal, bias = torch.ones(5, 5, dtype=torch.bool).tril(), torch.randn(1, 1, 5, 5)
    for mask, whole in ((None, picked & causal), (causal[None, None], picked & causal), (bias, bias.masked_fill(~picked, -1e9))):
        ours, _ = evosdpa.transformers.evosdpa_attention_forward(
            torch.nn.Module(), q, q[:, :2], q[:, :2], mask, is_causal=True, indices=picks.int()
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q[:, :2], q[:, :2], whole, enable_gqa=True)
        torch.testing.assert_close(ours.transpose(1, 2), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [64, 48])
def test_block_masks(size):
    """transformers hands a ``BlockMask`` of its caller's to every layer."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(2, 4, 130, 8)
    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 70 + b), 2, 1, 130, 130, device="cpu", BLOCK_SIZE=size)
    attend = evosdpa.transformers.evosdpa_attention_forward
    ours, _ = attend(torch.nn.Module(), q, q[:, :2], q[:, :2], mask)
    dense = flex.create_mask(mask.mask_mod, 2, 1, 130, 130, device="cpu")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q[:, :2], q[:, :2], dense, enable_gqa=True)
    torch.testing.assert_close(ours.transpose(1, 2), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="is a BlockMask.*flex_attention"):
        attend(torch.nn.Module(), q.clone().requires_grad_(), q, q, mask)
    with pytest.raises(ValueError, match="130 queries and 90 keys"):
        attend(torch.nn.Module(), q, q[:, :, :90], q[:, :, :90], mask)


def patterns():
    start = torch.tensor([0, 3])
    made = {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(3),
        "chunk": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
        "chunk after padding": masking_utils.chunked_causal_mask_function(4, start),
        "unknown": lambda batch, head, query, key: key <= query,
    }
    if hasattr(masking_utils, "bidirectional_mask_function"):
        made["full"] = masking_utils.bidirectional_mask_function
        made["both sides"] = masking_utils.sliding_window_bidirectional_mask_function(2)
    return made


def arguments_of(function, queries, keys, offset, first_key, padding):
    given = {"batch_size": 2, "kv_length": keys, "kv_offset": first_key, "mask_function": function, "attention_mask": padding}
    if NEW:
        return {**given, "q_length": queries, "q_offset": offset}
    return {**given, "cache_position": torch.arange(offset, offset + queries)}


@pytest.mark.parametrize("name", patterns())
@pytest.mark.parametrize("queries,keys,offset,first_key", [(9, 9, 0, 0), (9, 14, 0, 0), (1, 14, 6, 0), (3, 14, 6, 0), (2, 5, 9, 6), (1, 5, 10, 6)])
@pytest.mark.parametrize("hidden", [None, "nothing", "left", "right", "middle", "short"])
def test_a_plan_says_what_the_mask_says(name, queries, keys, offset, first_key, hidden):
    """The plan, written out, against transformers' own mask."""
    padding = None
    if hidden is not None:
        padding = torch.ones(2, first_key + keys, dtype=torch.bool)
        padding[1, {"left": slice(0, 4), "right": slice(-3, None), "middle": slice(2, 4)}.get(hidden, slice(0))] = False
        padding = padding[:, : offset + queries] if hidden == "short" else padding
    given = arguments_of(patterns()[name], queries, keys, offset, first_key, padding)
    wanted = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    mask = _deferred.mask(**given, allow_is_causal_skip=False)
    if name == "unknown":
        assert type(mask) is torch.Tensor and torch.equal(mask, wanted)
        return
    assert mask.shape == wanted.shape and torch.equal(mask.clone(), wanted)
    for shifts in (True, False):
        plan = mask.facts.plan(shifts)
        if plan is None:
            assert name not in ("causal", "full") or offset + queries > first_key + keys
            return
        assert torch.equal(written_out(plan, queries, keys), wanted)
        assert shifts or "leftpad_k" not in plan.side
    # Told to torch without a mask, it is the same.
    key = torch.arange(keys)[None, :]
    if mask.facts.is_causal_alone():
        assert torch.equal(wanted, (key <= torch.arange(queries)[:, None] + (keys if queries == 1 else 0)).expand_as(wanted))
    assert wanted.all() or not mask.facts.is_nothing()
    assert _deferred.mask(**given) is not None, "layers may say another thing than a mask that is left out"


def written_out(plan, queries, keys):
    """What a call of this form computes with, as docs/problems.md has it: behind left padding the first key is key 0."""
    (left, right, bottom_right), seen, side = plan
    pad = side.get("leftpad_k", torch.zeros(2, dtype=torch.int32))[:, None, None, None]
    row = torch.arange(queries)[:, None]
    place = row + seen - pad - queries if bottom_right else row.expand(2, 1, queries, 1)
    key = torch.arange(keys)[None, :] - pad
    said = (key >= 0) & (key < seen - pad) & ((key >= place - left) | (left < 0)) & ((key <= place + right) | (right < 0))
    if "chunk" in side:
        said = said & (place // side["chunk"] == key // side["chunk"])
    said = said.expand(2, 1, queries, keys).clone()
    if "seqused_k" in side:
        said &= key < side["seqused_k"][:, None, None, None]
    if "mask" in side:
        said[..., :seen] &= side["mask"]
    return said


@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_a_mask_counts_more_than_what_a_layer_says(pattern):
    """PaliGemma's language model says that its layers are not causal, and is given a causal mask."""
    config = transformers.LlamaConfig(**table.TEXT, **({} if pattern == "causal" else {"is_causal": False}))
    model = transformers.LlamaModel._from_config(config, attn_implementation="eager").eval()
    for layer in model.layers:
        layer.self_attn.is_causal = pattern != "causal"
    tokens = torch.randint(3, 64, (2, 12))
    answers = []
    for name in ("eager", "evosdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            answers.append(model(tokens).last_hidden_state)
        answers.append(model(tokens).last_hidden_state.detach())  # what somebody differentiates is torch's
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-4, atol=1e-4)


def test_operations_on_a_mask_see_its_elements():
    given = arguments_of(masking_utils.causal_mask_function, 4, 6, 2, 0, None)
    mask = _deferred.mask(**given)
    wanted = masking_utils.sdpa_mask(**given)
    assert type(mask) is _deferred.DeferredMask and mask.dtype == torch.bool and mask.ndim == 4
    assert mask.to("cpu") is mask.to(torch.bool) is mask.contiguous() is mask and mask.to("cpu", copy=True) is not mask
    assert torch.equal(mask[:, :, :, :3], wanted[:, :, :, :3])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(wanted, 0.0, -1.0))
    assert torch.equal(~mask & True, ~wanted) and torch.equal(mask.to(torch.float32), wanted.float())


def test_a_mask_keeps_the_place_it_was_made_for():
    """A static cache gives the tensor in which it counts, and counts on before a layer looks."""
    given = arguments_of(masking_utils.causal_mask_function, 3, 9, 4, 0, None)
    wanted = masking_utils.sdpa_mask(**given)
    counted = given["cache_position"] if "cache_position" in given else torch.tensor(4)
    mask = _deferred.mask(**given if "cache_position" in given else {**given, "q_offset": counted})
    counted += 3
    assert type(mask) is _deferred.DeferredMask and torch.equal(mask.clone(), wanted)


@torch.no_grad()
def test_a_static_cache_where_torch_computes():
    """float64 is torch's: its mask is written out in a layer, when the cache has counted on."""
    _, model = table.built("llama")
    model = model.double()
    tokens = torch.arange(24).reshape(2, 12) + 3

    def steps(implementation):
        model.set_attn_implementation(implementation)
        old = {} if NEW else {"max_batch_size": 2}
        cache, said = transformers.StaticCache(config=model.config, max_cache_len=20, **old), []
        for first, last in ((0, 5), (5, 6), (6, 9), (9, 12)):
            place = {} if NEW else {"cache_position": torch.arange(first, last)}
            said.append(model(tokens[:, first:last], past_key_values=cache, use_cache=True, **place).logits)
        return torch.cat(said, 1)

    torch.testing.assert_close(steps("evosdpa"), steps("sdpa"))


@torch.no_grad()
def test_a_model_that_says_only_by_its_mask_that_it_is_causal():
    """PEGASUS-X' decoder does not call itself causal; transformers' own attention by torch refuses it."""
    config = transformers.PegasusXConfig(
        **{**table.SEQ2SEQ, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "block_size": 8, "num_global_tokens": 4}
    )
    torch.manual_seed(0)
    model = transformers.PegasusXForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.normal_(0.0, 1.5 * weight[0].numel() ** -0.5)
    given, _ = table.inputs_of("seq2seq", "right")
    wanted = table.answer(model, given, None)
    model.set_attn_implementation("evosdpa")
    torch.testing.assert_close(table.answer(model, given, None), wanted, rtol=1e-4, atol=1e-4)


def test_a_pattern_that_means_another_thing_is_not_taken_for_it():
    def made(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window  # one more than it was

        return inner_mask

    function = made(3)
    function.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    function.__module__ = masking_utils.__name__
    assert _deferred._read(function) is not None and _deferred.recognised(function) is None


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("by_token", [False, True], ids=["heads first", "tokens first"])
def test_an_output_lies_by_token_however_queries_lie(queries, by_token):
    """A layer's next step views it as one row a token; a copy for that would cost as much as a small call."""
    module = torch.nn.Module()
    q = torch.randn(2, queries, 4, 16).transpose(1, 2) if by_token else torch.randn(2, 4, queries, 16)
    k, v = torch.randn(2, 2, queries, 16), torch.randn(2, 2, queries, 16)
    with torch.no_grad():
        out, _ = evosdpa.transformers.evosdpa_attention_forward(module, q, k, v, None)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        straight = evosdpa._torch.straight(q, k, v, None, True, True, False, False, False, True)
    for found in (out, straight):
        assert found.is_contiguous() and found.shape == (2, queries, 4, 16)
        torch.testing.assert_close(found.transpose(1, 2), wanted)


def test_who_sees_no_key_beside_a_position_bias():
    """The mean of all values, as in transformers' own attention: a speech model's next layers may pool such rows with others."""
    q, k, v, bias = (torch.randn(2, 4, 16, size) for size in (8, 8, 8, 16))
    mask = torch.rand(2, 1, 16, 16) < 0.5
    mask[:, :, 3] = False
    attend = evosdpa.transformers.evosdpa_attention_forward
    with torch.no_grad():
        out, _ = attend(torch.nn.Module(), q, k, v, mask, is_causal=False, scaling=0.3, position_bias=bias)
    weights = torch.softmax(q @ k.mT * 0.3 + torch.where(mask, bias, torch.finfo(torch.float32).min), -1)
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2), rtol=1e-5, atol=1e-5)
