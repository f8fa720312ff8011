"""What FlashInfer's ``plan`` says, as the native side takes it: lists of pages as a table, flat masks as dense ones, and a call
without its tensors."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _cache_torch, _native, _side, _torch


class Steady:
    """Lists and tables at addresses that stay, since graphs read there again and again."""

    def __init__(self, buffers: dict[str, Any]) -> None:
        for name, buffer in buffers.items():
            if not isinstance(buffer, Tensor) or buffer.dtype != torch.int32 or buffer.dim() != 1:
                raise ValueError(f"use_cuda_graph=True needs {name}, a list of int32 with room for every plan")
        first = next(iter(buffers.values()))
        self.batch, self.device = first.numel() - 1, first.device
        pages = [buffer.numel() for name, buffer in buffers.items() if "indices" in name]
        self.columns: int = max(pages[0], 1) if pages else 0
        self.held: _side.Side = {}

    def take(self, side: _side.Side) -> _side.Side:
        if "mask" in side:
            raise NotImplementedError("custom_mask with use_cuda_graph=True: evosdpa has masks without it; leave one out")
        steady: _side.Side = {}
        for name, value in side.items():
            if not isinstance(value, Tensor):
                continue  # lengths of the longest are the tensors' then
            batch = value.size(0) - name.startswith("cu_seqlens")
            if batch != self.batch:
                raise ValueError(f"{batch} sequences are planned, but the buffers for CUDA graphs are of {self.batch}")
            if name == "page_table":
                if value.size(1) > self.columns:
                    raise ValueError(f"a sequence has {value.size(1)} pages, but the buffer of indices has room for {self.columns}")
                value = torch.nn.functional.pad(value, (0, self.columns - value.size(1)))
            if name not in self.held:
                self.held[name] = torch.empty_like(value, device=self.device)
            steady[name] = self.held[name].copy_(value)
        return steady


#: The native side's numbers for types.
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 4, torch.int8: 5}
_EIGHT_BIT = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_NO_SCALES: tuple[Any, Any] = (None, None)
#: On each device, the last the longest. What a graph has captured must stay, so none is given up: each is at least twice the one before.
_ones: dict[torch.device, list[Tensor]] = {}


class Plan:
    """A call without its tensors."""

    def __init__(
        self,
        side: _side.Side,
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        pos_encoding_mode: str,
        data_types: tuple[Any, Any, Any],
        page_size: int | None = None,
        q_len: int | None = None,
        steering: dict[str, Any] | None = None,
    ) -> None:
        if heads[1] < 1 or heads[0] % heads[1]:
            raise ValueError(f"{heads[0]} query heads cannot share {heads[1]} key/value heads")
        self.side, self.heads, self.dims, self.page_size = side, heads, dims, page_size
        #: Queries of each sequence, where all have as many.
        self.q_len = q_len
        self.invariant = asks_for_invariance(steering or {})
        self.types = _types(*data_types)
        self.device: torch.device | None = None
        self._ones: tuple[Tensor, Tensor] | None = None
        self.lists: tuple[Any, ...] = ()
        #: Whether each sequence has one query, and queries no dimension of tokens.
        self.one_query = page_size is not None and "cu_seqlens_q" not in side
        self.longest = (side.get("max_seqlen_q"), side.get("max_seqlen_k"))
        #: Whether only the tensors bound the lengths of packed sequences.
        self.unbounded = not side.keys().isdisjoint(("cu_seqlens_q", "cu_seqlens_k")) and self.longest == (None, None)
        #: Types that kernels do not have are -2: the long way says so.
        kinds = [-1 if kind is None else _KINDS.get(kind, -2) for kind in self.types]
        self.planned = (*heads, *dims, *kinds)
        self._modify(causal, window_left, logits_soft_cap, sm_scale, pos_encoding_mode)

    def _modify(self, causal: bool, window_left: int, logits_soft_cap: float | None, sm_scale: float | None, pos_encoding_mode: str) -> None:
        if pos_encoding_mode != "NONE":
            hint = "give alibi_slopes to flash_attn_varlen_func" if pos_encoding_mode == "ALIBI" else "turn q and k beforehand"
            raise NotImplementedError(f"pos_encoding_mode is {pos_encoding_mode!r}: evosdpa has 'NONE'; {hint}")
        self.sm_scale, self.window = sm_scale, (window_left, 0 if causal else -1, True)
        self.side = {name: value for name, value in self.side.items() if name != "softcap"}
        self.softcap = float(logits_soft_cap or 0.0)
        if self.softcap:
            self.side["softcap"] = self.softcap
        self.is_plain = "mask" not in self.side and -2 not in self.planned

    def changed(self, causal: bool | None, *rest: Any) -> Plan:
        """The same sequences under other modifiers; causal as it was where that is not said, and never with a mask."""
        other = copy.copy(self)
        other._modify(self.window[1] == 0 if causal is None else causal and "mask" not in self.side, *rest)
        return other

    def check_rows(self, q: Tensor, q_len_per_req: int | None) -> None:
        """Refuses queries that are not planned; what they see is not."""
        if q_len_per_req is not None and q_len_per_req != self.q_len:
            said = "queries of any number" if self.q_len is None else f"{self.q_len}"
            raise ValueError(f"q_len_per_req is {q_len_per_req}, but was planned with {said}; plan again")
        batch = self.side["page_table"].size(0)
        if self.q_len is not None and q.size(0) != batch * self.q_len:
            raise ValueError(f"q has {q.size(0)} rows, but was planned with {batch} sequences of q_len_per_req={self.q_len}; plan again")

    def pages_of(self, cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[pages, page size, heads, dim]``."""
        k, v = halves(cache)
        if k.dim() != 4 or v.dim() != 4:
            form = "[pages, page size, heads, dim]" if layout == "NHD" else "[pages, heads, page size, dim]"
            raise ValueError(f"the cache has shapes {list(k.shape)} and {list(v.shape)}; use {form} for keys and for values")
        if layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if k.size(1) != self.page_size:
            raise ValueError(f"the cache has pages of {k.size(1)} tokens in the layout {layout}, but was planned with {self.page_size}")
        return k, v

    def move_to(self, device: torch.device) -> None:
        """Lists and tables to the tensors' device, where they stay: a run copies nothing."""
        if self.device == device:
            return
        self._ones = None
        self.side = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.side.items()}
        given = self.side.get
        self.lists = (given("cu_seqlens_q"), given("cu_seqlens_k"), None, None, given("seqused_k"), None, None, None, given("page_table"))
        self.device = device

    def straight(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: tuple[float | None, float | None, float | None],
        window_left: int | None,
        sinks: Tensor | None,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None] | None:
        """The output and, with ``with_lse``, the natural log-sum-exp, by one native call: ``[…, tokens, heads, dim]`` in and out, or queries
        ``[sequences, heads, dim]`` where each sequence has one. ``None`` is for :meth:`attend` to look into."""
        if not self.is_plain or window_left is not None or _torch.compiling():
            return None
        scores = (None, self.softcap, 0, None, sinks) if self.softcap or sinks is not None else None
        if self.device is None:
            self.move_to(q.device)
        tensors, scale, times = (q, k, v), self.sm_scale, 1.0
        of_codes = _NO_SCALES
        # Servers give scales to every cache, and 1 to those that have none.
        if scales != (None, None, None) or k.dtype in _EIGHT_BIT:
            if any(scale is not None and type(scale) is not float for scale in scales):
                return None
            q_scale, k_scale, times = (1.0 if scale is None else scale for scale in scales)
            if q_scale != 1.0 or k_scale != 1.0:
                scale = (q.shape[-1] ** -0.5 if scale is None else scale) * q_scale * k_scale
            if k.dtype in _EIGHT_BIT:
                ones = self.ones(k)
                if ones is None:
                    return None
                of_codes = ones
        longest = (q.shape[0], k.shape[0]) if self.unbounded else self.longest
        with invariantly() if self.invariant else _AS_EVER:
            done: Any = _native.straight_cache(
                tensors,
                None,
                None,
                self.lists,
                of_codes,
                longest,
                scale,
                self.window,
                True,
                with_lse,
                False,
                self.one_query,
                self.planned,
                scores,
            )
        if done is None:
            return None
        out, lse = done if with_lse else (done, None)
        out = out if times == 1.0 else out * times
        return out, lse if lse is None or self.one_query else lse.T

    def ones(self, cache: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scales of 8-bit keys and values, ``[sequences, key/value heads]``; ``None`` where they would be made for a graph alone."""
        if self._ones is None:
            table = self.side.get("page_table")
            sequences = self.side["cu_seqlens_q"].size(0) - 1 if table is None else table.size(0)
            count, kept = sequences * self.heads[1], _ones.setdefault(cache.device, [])
            if not kept or kept[-1].numel() < count:
                if cache.is_cuda and torch.cuda.is_current_stream_capturing():
                    return None
                kept.append(torch.ones(2 * count, device=cache.device))
            ones = kept[-1][:count].view(sequences, self.heads[1])
            self._ones = ones, ones
        return self._ones

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: tuple[float | None, float | None, float | None],
        window_left: int | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``[batch, heads, sequence, dim]`` views in; output and natural log-sum-exp of the same order out."""
        got = (q.size(1), k.size(1), q.size(3), v.size(3))
        if got != (*self.heads, *self.dims):
            names = "query heads, key/value heads, head dimension, value dimension"
            raise ValueError(f"tensors have {got} ({names}), but were planned with {(*self.heads, *self.dims)}")
        for name, tensor, planned in (("q", q, self.types[0]), ("keys", k, self.types[1])):
            if planned is not None and tensor.dtype != planned:
                raise TypeError(f"{name} hold {tensor.dtype}, but were planned with {planned}")
        q_scale, k_scale, v_scale = (_scale(name, scale) for name, scale in zip("qkv", scales))
        window = self.window if window_left is None else (window_left, *self.window[1:])
        self.move_to(q.device)
        side = {**self.side, **_scales_of_codes(q, k)}
        if self.unbounded:
            side |= {"max_seqlen_q": q.size(2)} | ({"max_seqlen_k": k.size(2)} if "cu_seqlens_k" in side else {})
        if sinks is not None:
            side["sinks"] = sinks.to(q.device, torch.float32)
        scale = (q.size(3) ** -0.5 if self.sm_scale is None else self.sm_scale) * q_scale * k_scale
        with invariantly() if self.invariant else _AS_EVER:
            out, lse = _cache_torch.attend(q, k, v, scale, window, True, False, side)
        assert lse is not None  # asked for
        return out * v_scale if v_scale != 1.0 else out, lse


_AS_EVER = contextlib.nullcontext()


@contextlib.contextmanager
def invariantly() -> Iterator[None]:
    """Calls of this thread give a sequence the same bits whatever else is in its batch."""
    before = _native.set_batch_invariant_here(True)
    try:
        yield
    finally:
        _native.set_batch_invariant_here(before)


def asks_for_invariance(steering: dict[str, Any]) -> bool:
    """Splits of one size, or none: FlashInfer's callers ask for them where a sequence's bits must not depend on its neighbours."""
    size = steering.get("fixed_split_size")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise ValueError(f"fixed_split_size is {size!r}, but must be a number of tokens, or -1 or None for none")
    return bool(steering.get("disable_split_kv")) or size not in (None, -1)


def checked_layout(layout: str) -> str:
    if layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {layout!r}; use 'NHD' or 'HND'")
    return layout


def halves(cache: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.size(1) != 2:
            raise ValueError(f"the cache has shape {list(cache.shape)}; use [pages, 2, …] with keys and values, or a pair")
        k, v = cache.unbind(1)
        return k, v
    k, v = cache
    return k, v


def _integers(**named: Tensor) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, but must be a list of int32 in a torch tensor")
        if value.dtype != torch.int32 or value.dim() != 1:
            raise TypeError(f"{name} holds {value.dtype} of shape {list(value.shape)}, but must be a list of int32")


def packed(which: str, indptr: Tensor) -> _side.Side:
    name = {"q": "qo_indptr", "k": "kv_indptr"}[which]
    _integers(**{name: indptr})
    if indptr.numel() < 1:
        raise ValueError(f"{name} is empty, but must have one value more than there are sequences")
    lengths = indptr.cpu().long().diff()
    if int(indptr[0]) < 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name} is {indptr.tolist()}, but must start at 0 or more and not go back")
    return {f"cu_seqlens_{which}": indptr, f"max_seqlen_{which}": max([1, *lengths.tolist()])}


def paged(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> _side.Side:
    """The same as a table with a row for each sequence, and how many keys each has."""
    _integers(indptr=indptr, indices=indices, last_page_len=last_page_len)
    indptr, indices, last_page_len = indptr.cpu(), indices.cpu(), last_page_len.cpu()
    pages = indptr[1:] - indptr[:-1]
    batch = pages.numel()
    if last_page_len.numel() != batch:
        raise ValueError(f"last_page_len has {last_page_len.numel()} values for {batch} sequences")
    if batch and (int(indptr[0]) < 0 or int(pages.min()) < 0):
        raise ValueError(f"indptr is {indptr.tolist()}, but must start at 0 or more and not go back")
    if batch and int(indptr[-1]) > indices.numel():
        raise ValueError(f"indptr ends at {int(indptr[-1])}, but there are {indices.numel()} indices")
    wrong = (pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(f"last_page_len of sequence {at} is {int(last_page_len[at])}, but must be 1 to the page size of {page_size}")
    columns = max(int(pages.max()) if batch else 1, 1)
    place = torch.arange(columns)[None, :]
    table = torch.zeros(batch, columns, dtype=torch.int32)
    table[place < pages[:, None]] = indices[int(indptr[0]) : int(indptr[-1])] if batch else indices[:0]
    keys = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)
    return {"page_table": table, "seqused_k": keys}


def rows_of(count: int, batch: int) -> Tensor:
    """Where queries begin when each sequence has so many."""
    if count < 1:
        raise ValueError(f"q_len_per_req is {count}, but must be 1 or more")
    return torch.arange(0, count * batch + 1, count, dtype=torch.int32)


def masks(qo_indptr: Tensor, keys: Tensor, longest: int, custom: Tensor | None, bits: Tensor | None) -> _side.Side:
    """FlashInfer's flat masks, ``queries × keys`` of one sequence after the other, as one dense tensor."""
    name, given = ("custom_mask", custom) if bits is None else ("packed_custom_mask", bits)
    if given is None:
        return {}
    if given.dtype not in (torch.uint8,) + (() if bits is not None else (torch.bool,)):
        raise TypeError(f"{name} holds {given.dtype}, but must hold {'booleans' if bits is None else 'bits in uint8'}; True shows a key")
    queries, columns = (qo_indptr[1:] - qo_indptr[:-1]).tolist(), keys.tolist()
    if len(queries) != len(columns):
        raise ValueError(f"queries are of {len(queries)} sequences, keys of {len(columns)}")
    # Each sequence begins with a new byte, the lowest bit first.
    sizes = [rows * count if bits is None else -(-rows * count // 8) for rows, count in zip(queries, columns)]
    if given.numel() != sum(sizes):
        raise ValueError(f"{name} has {given.numel()} values, but the queries and keys that are planned have {sum(sizes)}")
    dense = torch.zeros(len(queries), 1, max([1, *queries]), longest, dtype=torch.bool)
    for b, part in enumerate(given.reshape(-1).cpu().split(sizes)):
        if bits is not None:
            part = ((part[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(-1)[: queries[b] * columns[b]]
        dense[b, 0, : queries[b], : columns[b]] = part.reshape(queries[b], columns[b]).bool()
    return {"mask": dense}


def _scales_of_codes(q: Tensor, k: Tensor) -> _side.Side:
    """8-bit tensors are read at scale one: scales are numbers for whole tensors, applied to scores and output."""
    of = {"q_scales": (q,), "k_scales": (k,), "v_scales": (k,)}
    side: _side.Side = {name: torch.ones(1, device=q.device) for name, (x,) in of.items() if x.dtype in _EIGHT_BIT}
    return side | {"scales_per": "tensor"} if side else side


def _scale(name: str, scale: Any) -> float:
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise NotImplementedError(f"{name}_scale has shape {list(scale.shape)}: evosdpa's wrappers take one for the whole tensor")
    return 1.0 if scale is None else float(scale)


def of_queries(data_type: Any, o_data_type: Any) -> Any:
    """What ``data_type`` says of queries: where it names codes, caches may hold them alone, unless outputs say more."""
    return None if o_data_type is None and _dtype(data_type) in _EIGHT_BIT else data_type


def _dtype(kind: Any) -> torch.dtype | None:
    found = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if kind is not None and not isinstance(found, torch.dtype):
        raise TypeError(f"a data type is {kind!r}; give one of torch's, or its name")
    return found


def _types(q: Any, kv: Any, out: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What queries and keys must be. Outputs are of the queries' type, and bfloat16 where those are codes."""
    queries, keys, wanted = (_dtype(kind) for kind in (q, kv, out))
    made = torch.bfloat16 if queries in _EIGHT_BIT else queries
    if wanted is not None and wanted != made:
        if queries is not None or wanted not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(f"o_data_type is {wanted}: outputs are of the queries' type, bfloat16 for codes; convert the result")
        queries = wanted
    return queries, keys


#: Options that choose among FlashInfer's kernels, or give them memory or what follows from other arguments: results are the same without,
#: but for those of :func:`asks_for_invariance`.
_STEERING = frozenset(
    "backend jit_args jit_kwargs use_tensor_cores non_blocking allow_fp16_qk_reduction disable_split_kv fixed_split_size block_tables "
    "seq_lens seq_lens_q max_token_per_sequence max_sequence_kv use_fp16_qk_reduction use_fp16_softmax".split()
)
#: What others are when they say nothing. One query sees nothing behind it, whatever the window there.
_NEUTRAL = {"q_len_per_req": (1,), "window_right": (0, -1), "o_scale": (1.0,)}


def refuse_unknown(options: dict[str, Any]) -> None:
    """Anything else might change the result."""
    for name, value in options.items():
        if value is None or value is False or name in _STEERING or (type(value) in (int, float) and value in _NEUTRAL.get(name, (0,))):
            continue
        raise NotImplementedError(f"{name}={value!r} is not known to evosdpa's wrappers; leave it out")


def given_back(out: Tensor, lse: Tensor | None, out_given: Tensor | None, lse_given: Tensor | None, return_lse: bool) -> Any:
    """The results, in the caller's tensors where there are some."""
    if out_given is not None:
        out = copied(out, out_given, "out")
    if not return_lse or lse is None:
        return out
    lse = (lse / math.log(2.0)).contiguous()
    return out, lse if lse_given is None else copied(lse, lse_given, "lse")


def copied(result: Tensor, given: Tensor, name: str) -> Tensor:
    """The caller's tensor, which must be of the result's form: a copy would spread one row over many."""
    if given.shape != result.shape:
        raise ValueError(f"{name} has shape {list(given.shape)}, but the result has {list(result.shape)}")
    return given.copy_(result)
