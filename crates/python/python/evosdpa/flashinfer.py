"""FlashInfer's attention wrappers, computed by evosdpa.

``plan`` says how sequences lie in the cache, ``run`` computes attention, as often as you like::

    from evosdpa.flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
    out = wrapper.run(q, (k_cache, v_cache))

Caches are ``[pages, page size, heads, dim]`` (NHD) or ``[pages, heads, page size, dim]`` (HND), as a pair or as one tensor
with keys and values along its second dimension. Log-sum-exps are to base 2, ``[tokens, heads]``, as FlashInfer's are.

With ``use_cuda_graph=True`` and the buffers that FlashInfer takes then, a captured ``run`` reads what the last ``plan`` said: plan as
often as you like between replays, for as many sequences as at first, and no more pages than the buffer of indices has.

Options that only steer FlashInfer's kernels (workspaces, backends, splits) change nothing here. Rotary embedding and ALiBi inside the
kernel, and masks of one's own under ``use_cuda_graph``, raise ``NotImplementedError``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _cache_torch, _side, _torch

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]


class _Wrapper:
    """What the wrappers share: options at construction, and the plan."""

    #: Buffers for graphs: the first says how many sequences there are, one that ends in ``indices`` how many pages.
    _BUFFERS: tuple[str, ...] = ()

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", use_cuda_graph: bool = False, **steering: Any) -> None:
        del float_workspace_buffer  # memory of FlashInfer's kernels
        buffers = {name: steering.pop(name, None) for name in self._BUFFERS}
        _refuse_unknown(steering)
        self._layout = _checked_layout(kv_layout)
        self._planned: _Plan | None = None
        self._steady = _Steady(buffers) if use_cuda_graph else None

    def _side(self, side: _side.Side) -> _side.Side:
        """What is planned, where graphs find it again."""
        return side if self._steady is None else self._steady.take(side)

    def _plan(self) -> _Plan:
        if self._planned is None:
            raise RuntimeError("call plan() before run()")
        return self._planned

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class _Steady:
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


class _Plan:
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
        data_types: tuple[Any, Any],
    ) -> None:
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode is {pos_encoding_mode!r}: evosdpa has 'NONE'; turn q and k beforehand")
        if heads[0] % heads[1]:
            raise ValueError(f"{heads[0]} query heads cannot share {heads[1]} key/value heads")
        self.side, self.heads, self.dims, self.causal, self.window_left = side, heads, dims, causal, window_left
        self.sm_scale = sm_scale
        self.types = tuple(_dtype(kind) for kind in data_types)
        if logits_soft_cap:
            self.side["softcap"] = float(logits_soft_cap)
        self.device: torch.device | None = None
        self.lists: tuple[Any, ...] = ()
        self.window = (window_left, 0 if causal else -1, True)
        self.longest = (side.get("max_seqlen_q"), side.get("max_seqlen_k"))
        #: Whether only the tensors bound the lengths of packed sequences.
        self.unbounded = not side.keys().isdisjoint(("cu_seqlens_q", "cu_seqlens_k")) and self.longest == (None, None)
        #: Types that kernels do not have are -2: the long way says so.
        kinds = [-1 if kind is None else _KINDS.get(kind, -2) for kind in self.types]
        self.planned = (*heads, *dims, *kinds)
        self.is_plain = not side.keys() & {"softcap", "mask"} and -2 not in kinds

    def move_to(self, device: torch.device) -> None:
        """Lists and tables to the tensors' device, where they stay: a run copies nothing."""
        if self.device == device:
            return
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
        one_query: bool = False,
    ) -> Tensor | None:
        """The output alone, by one native call: ``[…, tokens, heads, dim]`` in and out, or queries ``[sequences, heads, dim]`` where each
        sequence has one. ``None`` is for :meth:`attend` to look into."""
        if not self.is_plain or sinks is not None or window_left is not None or scales != (None, None, None) or _torch.compiling():
            return None
        if self.device is None:
            self.move_to(q.device)
        tensors, no_scales = (q, k, v), (None, None)
        longest = (q.shape[0], k.shape[0]) if self.unbounded else self.longest
        done: Tensor | None = _torch.straight_cache(
            tensors, None, None, self.lists, no_scales, longest, self.sm_scale, self.window, True, False, False, one_query, self.planned
        )
        return done

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
        q_scale, k_scale, v_scale = (1.0 if scale is None else float(scale) for scale in scales)
        left = self.window_left if window_left is None else window_left
        self.move_to(q.device)
        side = {**self.side, **_scales_of_codes(q, k)}
        if self.unbounded:
            side |= {"max_seqlen_q": q.size(2)} | ({"max_seqlen_k": k.size(2)} if "cu_seqlens_k" in side else {})
        if sinks is not None:
            side["sinks"] = sinks.to(q.device, torch.float32)
        scale = (q.size(3) ** -0.5 if self.sm_scale is None else self.sm_scale) * q_scale * k_scale
        out, lse = _cache_torch.attend(q, k, v, scale, (left, 0 if self.causal else -1, True), True, False, side)
        assert lse is not None  # asked for
        return out * v_scale if v_scale != 1.0 else out, lse


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a sequence, over a paged cache."""

    _BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        **steering: Any,
    ) -> None:
        """Sequence ``i`` has the pages ``indices[indptr[i] : indptr[i + 1]]``, the last filled with ``last_page_len[i]`` tokens."""
        del rope_scale, rope_theta
        _refuse_unknown(steering)
        _refuse_output(o_data_type, q_data_type or data_type)
        self._planned = _Plan(
            self._side(_paged(indptr, indices, last_page_len, page_size)),
            (num_qo_heads, num_kv_heads),
            (head_dim, head_dim),
            causal=False,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type or data_type, kv_data_type or data_type or q_data_type),
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of ``q``, ``[sequences, heads, dim]``: the output of the same form, with ``return_lse`` and ``[sequences, heads]``."""
        del enable_pdl
        k, v = _halves(paged_kv_cache)
        plan, scales = self._plan(), (q_scale, k_scale, v_scale)
        if not return_lse and out is None:
            done = plan.straight(q, *_by_token(k, v, self._layout), scales, window_left, sinks, True)
            if done is not None:
                return done
        k, v = _by_head(k, v, self._layout)
        result, found = plan.attend(q.unsqueeze(2), k, v, scales, window_left, sinks)
        return _given(result.squeeze(2), found.squeeze(2), out, lse, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Packed queries, over a paged cache."""

    _BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        **steering: Any,
    ) -> None:
        """Sequence ``i`` has the queries ``qo_indptr[i] … qo_indptr[i + 1]``, and pages as in decoding."""
        del rope_scale, rope_theta, use_fp16_qk_reduction
        _refuse_unknown(steering)
        _refuse_output(o_data_type, q_data_type)
        side = _paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        side |= _packed("q", qo_indptr)
        masks = _mask(qo_indptr, side["seqused_k"], side["page_table"].size(1) * page_size, custom_mask, packed_custom_mask)
        self._planned = _Plan(
            self._side(side | masks),
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal and not masks,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type, kv_data_type or q_data_type),
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of packed ``q``, ``[tokens, heads, dim]``."""
        del enable_pdl
        k, v = _halves(paged_kv_cache)
        plan, scales = self._plan(), (q_scale, k_scale, v_scale)
        if not return_lse and out is None:
            done = plan.straight(q, *_by_token(k, v, self._layout), scales, window_left, sinks)
            if done is not None:
                return done
        k, v = _by_head(k, v, self._layout)
        result, found = plan.attend(q.transpose(0, 1).unsqueeze(0), k, v, scales, window_left, sinks)
        return _given(result[0].transpose(0, 1), found[0].T, out, lse, return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Packed queries, keys and values."""

    _BUFFERS = ("qo_indptr_buf", "kv_indptr_buf")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        **steering: Any,
    ) -> None:
        """Sequence ``i`` has the queries ``qo_indptr[i] … qo_indptr[i + 1]`` and the keys ``kv_indptr[i] … kv_indptr[i + 1]``."""
        del rope_scale, rope_theta, use_fp16_qk_reduction
        _refuse_unknown(steering)
        _refuse_output(o_data_type, q_data_type)
        side = _packed("q", qo_indptr) | _packed("k", kv_indptr)
        keys = kv_indptr[1:] - kv_indptr[:-1]
        masks = _mask(qo_indptr, keys, side["max_seqlen_k"], custom_mask, packed_custom_mask)
        self._planned = _Plan(
            self._side(side | masks),
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal and not masks,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type, kv_data_type or q_data_type),
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of packed tensors, ``[tokens, heads, dim]``."""
        del enable_pdl
        plan, scales = self._plan(), (q_scale, k_scale, v_scale)
        if not return_lse and out is None:
            done = plan.straight(q, k, v, scales, window_left, sinks)
            if done is not None:
                return done
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        result, found = plan.attend(q, k, v, scales, window_left, sinks)
        return _given(result[0].transpose(0, 1), found[0].T, out, lse, return_lse)


def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", **arguments: Any
) -> Any:
    """One query, ``[heads, dim]``, over keys and values ``[tokens, heads, dim]`` (HND: heads first)."""
    result = single_prefill_with_kv_cache(
        q.unsqueeze(0), k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, **arguments
    )
    return tuple(x[0] for x in result) if isinstance(result, tuple) else result[0]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    use_tensor_cores: bool = False,
    use_fp16_qk_reduction: bool = False,
    backend: str = "auto",
) -> Any:
    """Queries of one sequence, ``[tokens, heads, dim]``, over its keys and values."""
    del use_tensor_cores, use_fp16_qk_reduction, backend
    if _checked_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, "NHD")
    queries, keys = (torch.tensor([0, x.size(0)], dtype=torch.int32) for x in (q, k))
    wrapper.plan(
        queries,
        keys,
        q.size(1),
        k.size(1),
        q.size(2),
        v.size(2),
        custom_mask=None if custom_mask is None else custom_mask.reshape(-1),
        packed_custom_mask=packed_custom_mask,
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
    )
    return wrapper.run(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks, return_lse=return_lse)


def _checked_layout(layout: str) -> str:
    if layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {layout!r}; use 'NHD' or 'HND'")
    return layout


def _halves(cache: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.size(1) != 2:
            raise ValueError(f"the cache has shape {list(cache.shape)}; use [pages, 2, …] with keys and values, or a pair")
        k, v = cache.unbind(1)
        return k, v
    k, v = cache
    return k, v


def _by_head(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """``[pages, heads, page size, dim]``."""
    return (k, v) if layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))


def _by_token(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """``[pages, page size, heads, dim]``."""
    return (k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def _integers(**named: Tensor) -> None:
    for name, value in named.items():
        if value.dtype != torch.int32 or value.dim() != 1:
            raise TypeError(f"{name} holds {value.dtype} of shape {list(value.shape)}, but must be a list of int32")


def _packed(which: str, indptr: Tensor) -> _side.Side:
    _integers(**{f"{which}_indptr": indptr})
    longest = int((indptr[1:] - indptr[:-1]).max()) if indptr.numel() > 1 else 1
    return {f"cu_seqlens_{which}": indptr, f"max_seqlen_{which}": max(longest, 1)}


def _paged(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> _side.Side:
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


def _mask(qo_indptr: Tensor, keys: Tensor, longest: int, custom: Tensor | None, packed: Tensor | None) -> _side.Side:
    """FlashInfer's flat masks, ``queries × keys`` of one sequence after the other, as one dense tensor."""
    if custom is None and packed is None:
        return {}
    queries = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
    dense = torch.zeros(len(queries), 1, max([1, *queries]), longest, dtype=torch.bool)
    at = 0
    for b, (rows, columns) in enumerate(zip(queries, keys.tolist())):
        size = rows * columns
        if packed is not None:
            # Each sequence begins with a new byte, the lowest bit first.
            size_bytes = -(-size // 8)
            part = packed[at : at + size_bytes].cpu()
            bits = (part[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            flat, at = bits.reshape(-1)[:size].bool(), at + size_bytes
        else:
            assert custom is not None
            flat, at = custom.reshape(-1)[at : at + size].cpu().bool(), at + size
        if flat.numel() != size:
            raise ValueError(f"the mask ends in sequence {b}, which has {rows} queries and {columns} keys")
        dense[b, 0, :rows, :columns] = flat.reshape(rows, columns)
    return {"mask": dense}


def _scales_of_codes(q: Tensor, k: Tensor) -> _side.Side:
    """8-bit tensors are read at scale one: scales are numbers for whole tensors, applied to scores and output."""
    of = {"q_scales": (q,), "k_scales": (k,), "v_scales": (k,)}
    side: _side.Side = {name: torch.ones(1, device=q.device) for name, (x,) in of.items() if x.dtype in _EIGHT_BIT}
    return side | {"scales_per": "tensor"} if side else side


def _dtype(kind: Any) -> torch.dtype | None:
    found = getattr(torch, kind) if isinstance(kind, str) else kind
    return found if isinstance(found, torch.dtype) else None


#: Options that choose among FlashInfer's kernels, or give them memory or what follows from other arguments: results are the same without.
_STEERING = frozenset(
    "backend jit_args jit_kwargs use_tensor_cores non_blocking allow_fp16_qk_reduction disable_split_kv fixed_split_size block_tables "
    "seq_lens seq_lens_q max_token_per_sequence max_sequence_kv".split()
)


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Anything else might change the result."""
    for name, value in options.items():
        if value is not None and name not in _STEERING:
            raise NotImplementedError(f"{name}={value!r} is not known to evosdpa's wrappers; leave it out")


def _refuse_output(wanted: Any, q: Any) -> None:
    if wanted is not None and _dtype(wanted) != _dtype(q):
        raise NotImplementedError(f"o_data_type is {wanted}: outputs are of the queries' type; convert the result")


def _given(out: Tensor, lse: Tensor, out_given: Tensor | None, lse_given: Tensor | None, return_lse: bool) -> Any:
    """The results, in the caller's tensors where there are some."""
    if out_given is not None:
        out = out_given.copy_(out)
    if not return_lse:
        return out
    lse = (lse / math.log(2.0)).contiguous()
    return out, lse if lse_given is None else lse_given.copy_(lse)
