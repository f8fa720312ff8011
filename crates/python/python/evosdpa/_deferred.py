"""Masks of transformers as what they say: causal, window, chunk, padding. Nothing of queries × keys is written out unless
somebody looks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from transformers import masking_utils

from . import _side, _window


#: Whose types differ from version to version.
_sdpa_mask: Any = masking_utils.sdpa_mask


class Pattern(NamedTuple):
    """Which keys a position sees: ``left`` before and ``right`` after its own, ``None`` for no bound, of its own chunk."""

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    #: Where chunks begin to count, for each sequence.
    chunk_start: Tensor | None = None


class Plan(NamedTuple):
    """A mask as a call has it: the first ``keys`` are read."""

    window: _window.Window
    keys: int
    side: _side.Side


class Facts:
    """All that a mask says."""

    def __init__(self, pattern: Pattern, queries: int, keys: int, shift: int, padding: Tensor | None, first_key: int) -> None:
        self.pattern = pattern
        self.queries = queries
        self.keys = keys
        #: Position of the first query, counted from the first key.
        self.shift = shift
        #: Keys that are there, ``[batch, keys]``; ``None`` when all are.
        self.padding = padding
        self.first_key = first_key
        self._plans: dict[bool, Plan | None] = {}

    def plan(self, shifts: bool = True) -> Plan | None:
        """``None`` when a call cannot say it but by a dense mask. Without ``shifts`` key 0 is the first of the tensor, as a bias
        counts them. Found once for all layers."""
        if shifts not in self._plans:
            self._plans[shifts] = self._planned(shifts)
        return self._plans[shifts]

    def _planned(self, shifts: bool) -> Plan | None:
        left, right, chunk, chunk_start = self.pattern
        keys = self.keys if right is None else min(self.keys, self.shift + self.queries + right)
        if keys <= 0:
            return None
        is_full = left is None and right is None and chunk is None
        reaches_end = keys == self.shift + self.queries
        if not is_full and self.shift != 0 and not reaches_end:
            return None  # aligned with neither end
        bottom_right = self.shift != 0
        side: _side.Side = {}
        if chunk is not None:
            if self.first_key % chunk or (chunk_start is not None and bool(chunk_start.any())):
                return None
            side["chunk"] = chunk
        if self.padding is not None:
            side |= _padded(self.padding[:, :keys], bottom_right, shifts and chunk is None and (is_full or reaches_end))
            # Behind padding the first key is key 0, so queries are counted from the last.
            bottom_right = bottom_right or ("leftpad_k" in side and not is_full)
        return Plan((-1 if left is None else left, -1 if right is None else right, bottom_right), keys, side)

    def is_causal_alone(self) -> bool:
        """Whether ``is_causal`` says it, as transformers' own attention takes it."""
        sees_all = self.shift + 1 >= self.keys if self.queries == 1 else self.shift == 0
        plan = self.plan() if sees_all and self.pattern.right == 0 and self._is_wide() else None
        return plan is not None and not plan.side

    def within_sequences(self) -> Pattern | None:
        """What each of packed sequences sees of its own tokens; ``None`` where the mask says more than that: chunks count from the first
        token of all, for transformers."""
        plan = self.plan() if self.shift == 0 and self.queries == self.keys else None
        return self.pattern if plan is not None and not plan.side else None

    def is_nothing(self) -> bool:
        """Whether every query sees every key."""
        plan = self.plan() if self.pattern.right != 0 and self._is_wide() else None
        return plan is not None and not plan.side

    def _is_wide(self) -> bool:
        left, right, chunk, _ = self.pattern
        reach = max(self.keys, self.shift + self.queries)
        return all(bound is None or bound == 0 or bound >= reach for bound in (left, right)) and (
            left != 0 and (chunk is None or chunk >= reach + self.first_key)
        )


class DeferredMask(Tensor):
    """A boolean ``[batch, 1, queries, keys]`` tensor whose elements are made when an operation asks for them."""

    facts: Facts
    _arguments: dict[str, Any]
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, facts: Facts, arguments: dict[str, Any]) -> DeferredMask:
        size = (arguments["batch_size"], 1, facts.queries, facts.keys)
        device = torch.device(arguments.get("device", "cpu"))
        make: Any = Tensor._make_wrapper_subclass
        mask: DeferredMask = make(cls, size, dtype=torch.bool, device=device)
        mask.facts, mask._arguments, mask._dense = facts, arguments, None
        return mask

    def __init__(self, facts: Facts, arguments: dict[str, Any]) -> None:
        super().__init__()

    def dense(self) -> Tensor:
        """Its elements, made once."""
        if self._dense is None:
            # A static cache counts on in the very tensor that said where queries begin, before the first layer looks.
            first = self.facts.first_key + self.facts.shift
            places: Any = {"q_offset": first}
            if self._arguments.get("cache_position") is not None:
                places = {"cache_position": torch.arange(first, first + self.facts.queries, device=self.device)}
            whole = {**self._arguments, **places, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            dense: Tensor = _sdpa_mask(**whole)
            self._dense = dense
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        return f"DeferredMask({vars(self.facts)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (Tensor.contiguous, Tensor.bool) or (func is Tensor.to and _is_there(*args, **(kwargs or {}))):
            return args[0]
        args, kwargs = _written_out(args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override, unused-ignore]
        """Code below Python's level."""
        args, kwargs = _written_out(args, kwargs)
        return func(*args, **kwargs)


# What is known of a mask without its elements.
_ABOUT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}


def _is_there(mask: DeferredMask, *where: Any, **named: Any) -> bool:
    """Whether ``mask.to(…)`` asks for what it is already."""
    if named.pop("copy", False) or (where and isinstance(where[0], Tensor)) or "other" in named:
        return False
    parse: Any = getattr(getattr(torch._C, "_nn"), "_parse_to")
    device, dtype, *_ = parse(*where, **named)
    return device in (None, mask.device) and dtype in (None, torch.bool)


def _written_out(args: Any, kwargs: Any) -> Any:
    return _pytree.tree_map_only(DeferredMask, DeferredMask.dense, (args, kwargs or {}))


def _padded(padding: Tensor, bottom_right: bool, may_shift: bool) -> _side.Side:
    """Keys that are there, by lengths where they are the first or, with ``may_shift``, the last of each sequence."""
    if bool(padding.all()):
        return {}
    lengths = padding.sum(-1, dtype=torch.int32)
    keys = padding.shape[1]
    place = torch.arange(keys, device=padding.device)
    hidden = keys - lengths
    forms = torch.stack([place < lengths[:, None], place >= hidden[:, None]])
    are_first, are_last = (forms == padding).flatten(1).all(1).tolist()
    if are_first and not bottom_right:
        return {"seqused_k": lengths}
    if are_last and may_shift:
        return {"leftpad_k": hidden}
    return {"mask": padding[:, None, None, :].contiguous()}


#: By the type of a model's configuration: whether its layers say themselves whether they are causal. Those that transformers' own attention by
#: torch may not compute need not, and say it by masks alone (PEGASUS-X).
_may_be_left_out: dict[type, bool] = {}


def learn(model: Any) -> None:
    """Remembers what a model may be given in the place of a mask."""
    kind = type(model.config)
    _may_be_left_out[kind] = _may_be_left_out.get(kind, True) and bool(model._supports_sdpa)


def mask(**arguments: Any) -> Tensor | None:
    """In the place of transformers' ``sdpa_mask``, for its mask registry. A mask is there even where it says no more than that a model is
    causal, or that it is not: layers may say another thing themselves (PaliGemma's)."""
    traced = _is_traced(arguments)
    facts = None if traced else _facts(arguments)
    if facts is not None:
        return DeferredMask(facts, arguments)
    if not traced or not _may_be_left_out.get(type(arguments.get("config")), False):
        arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    written: Tensor | None = _sdpa_mask(**arguments)
    return written


def recognised(function: Any) -> Pattern | None:
    """What one of transformers' mask functions says. It is asked about a few positions to be sure: a later version may
    mean another thing by the same name."""
    pattern = _read(function)
    if pattern is None:
        return None
    left, right, chunk, _ = pattern
    key = (_name(function), left, right, chunk)
    if key not in _known:
        _known[key] = _agrees(function, pattern)
    return pattern if _known[key] else None


_known: dict[Any, bool] = {}


def _read(function: Any) -> Pattern | None:
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    held: dict[str, Any] = {name: cell.cell_contents for name, cell in cells}
    name = _name(function)
    if name == "causal_mask_function":
        return Pattern(right=0)
    if name == "bidirectional_mask_function":
        return Pattern()
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Pattern(left=held["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return Pattern(held["sliding_window"], held["sliding_window"])
    if name == "chunked_overlay.<locals>.inner_mask":
        return Pattern(chunk=held["chunk_size"], chunk_start=held.get("left_padding"))
    if name == "and_masks.<locals>.and_mask":
        parts = [_read(part) for part in held["mask_functions"]]
        known = [part for part in parts if part is not None]
        return _both(known) if len(known) == len(parts) else None
    return None


def _both(parts: list[Any]) -> Pattern | None:
    whole = Pattern()
    for part in parts:
        if part.chunk is not None and whole.chunk is not None:
            return None
        bounds = [
            min((bound for bound in pair if bound is not None), default=None)
            for pair in ((whole.left, part.left), (whole.right, part.right))
        ]
        chunked = part if part.chunk is not None else whole
        whole = Pattern(bounds[0], bounds[1], chunked.chunk, chunked.chunk_start)
    return whole


def _agrees(function: Any, pattern: Pattern) -> bool:
    left, right, chunk, chunk_start = pattern
    edges = {0, 1, 7}
    for bound in (left, right, chunk):
        edges |= {bound - 1, bound, bound + 1, 2 * bound, 2 * bound + 1} if bound else set()
    place = torch.tensor(sorted(edge for edge in edges if edge >= 0))
    start: Any = 0
    if chunk_start is not None:
        place, start = place.to(chunk_start.device), chunk_start[0]
    query, key = place[:, None], place[None, :]
    wanted = torch.ones(len(place), len(place), dtype=torch.bool, device=place.device)
    if left is not None:
        wanted &= key >= query - left
    if right is not None:
        wanted &= key <= query + right
    if chunk is not None:
        wanted &= (key - start) // chunk == (query - start) // chunk
    zero = torch.zeros((), dtype=torch.long, device=place.device)
    said = function(zero, zero, query, key)
    return bool((said.expand_as(wanted) == wanted).all())


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", ""))


def _is_traced(arguments: dict[str, Any]) -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return True
    tensors = (arguments.get(name) for name in ("attention_mask", "q_offset", "cache_position"))
    return any(isinstance(x, Tensor) and (type(x) is not Tensor or x.is_meta) for x in tensors)


def _facts(arguments: dict[str, Any]) -> Facts | None:
    pattern = recognised(arguments.get("mask_function", masking_utils.causal_mask_function))
    if pattern is None:
        return None
    keys, first_key = arguments["kv_length"], int(arguments.get("kv_offset", 0))
    places = arguments.get("cache_position")
    if places is not None:  # before transformers 5
        queries, first_query = len(places), int(places[0]) if len(places) else 0
        if queries and int(places[-1]) != first_query + queries - 1:
            return None
    else:
        queries, first_query = arguments["q_length"], int(arguments.get("q_offset", 0))
    padding = arguments.get("attention_mask")
    if padding is not None:
        if padding.ndim != 2 or padding.dtype != torch.bool:
            return None
        missing = first_key + keys - padding.shape[-1]
        padding = torch.nn.functional.pad(padding, (0, missing)) if missing > 0 else padding
        padding = padding[:, first_key : first_key + keys]
        if padding.shape[0] != arguments["batch_size"]:
            return None
    if queries <= 0 or keys <= 0:
        return None
    return Facts(pattern, queries, keys, first_query - first_key, padding, first_key)
