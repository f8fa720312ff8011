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

``run_return_lse`` is ``run(…, return_lse=True)``. ``forward`` and ``forward_return_lse`` are FlashInfer's older forms of both: scale, softcap,
window and ``causal`` are what they are given, whatever was planned.

``fast_decode_plan`` and ``CUDAGraphBatchDecodeWithPagedKVCacheWrapper`` are other names for planning and for decoding in graphs.

Options that only steer FlashInfer's kernels (workspaces, backends, splits) change nothing here. Rotary embedding and ALiBi inside the
kernel, and masks of one's own under ``use_cuda_graph``, raise ``NotImplementedError``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _flashinfer, _side

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]


class _Wrapper:
    """What the wrappers share: options at construction, and the plan."""

    #: Buffers for graphs: the first says how many sequences there are, one that ends in ``indices`` how many pages.
    _BUFFERS: tuple[str, ...] = ()
    #: What :meth:`forward` takes where nobody says whether it is causal; ``None`` is as planned.
    _CAUSAL: bool | None = False

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", use_cuda_graph: bool = False, **steering: Any) -> None:
        del float_workspace_buffer  # memory of FlashInfer's kernels
        buffers = {name: steering.pop(name, None) for name in self._BUFFERS}
        #: As FlashInfer's wrappers say it; no result depends on it.
        self.use_tensor_cores = bool(steering.get("use_tensor_cores", False))
        _flashinfer.refuse_unknown(steering)
        self._layout = _flashinfer.checked_layout(kv_layout)
        self._planned: _flashinfer.Plan | None = None
        self._steady = _flashinfer.Steady(buffers) if use_cuda_graph else None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._steady is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Does nothing: there is no workspace of the caller's here."""

    def _side(self, side: _side.Side) -> _side.Side:
        """What is planned, where graphs find it again."""
        return side if self._steady is None else self._steady.take(side)

    def _plan(self) -> _flashinfer.Plan:
        if self._planned is None:
            raise RuntimeError("call plan() before run()")
        return self._planned

    def run(self, *tensors: Any, **options: Any) -> Any:
        raise NotImplementedError

    def run_return_lse(self, *tensors: Any, **options: Any) -> Any:
        """:meth:`run` with the log-sum-exp."""
        return self.run(*tensors, **{**options, "return_lse": True})

    def forward(
        self,
        *tensors: Any,
        causal: bool | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        **options: Any,
    ) -> Any:
        """:meth:`run` with these instead of what was planned, from now on."""
        del rope_scale, rope_theta, use_fp16_qk_reduction
        planned = self._plan()
        planned.move_to(tensors[0].device)
        self._planned = planned.changed(self._CAUSAL if causal is None else causal, window_left, logits_soft_cap, sm_scale, pos_encoding_mode)
        return self.run(*tensors, **options)

    def forward_return_lse(self, *tensors: Any, **options: Any) -> Any:
        """:meth:`forward` with the log-sum-exp."""
        return self.forward(*tensors, **{**options, "return_lse": True})

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class _Paged(_Wrapper):
    """Over a paged cache."""

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
        q_len_per_req: int | None = None,
        **steering: Any,
    ) -> Any:
        """Attention of ``q``, ``[tokens, heads, dim]``: the output of the same form, with ``return_lse`` and ``[tokens, heads]``."""
        del enable_pdl
        _flashinfer.refuse_unknown(steering)
        plan, scales = self._plan(), (q_scale, k_scale, v_scale)
        if plan.q_len not in (None, 1) or q_len_per_req is not None:
            plan.check_rows(q, q_len_per_req)
        k, v = plan.pages_of(paged_kv_cache, self._layout)
        done = plan.straight(q, k, v, scales, window_left, sinks, return_lse)
        if done is not None:
            return _flashinfer.given_back(*done, out, lse, return_lse)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if plan.one_query:
            result, found = plan.attend(q.unsqueeze(2), k, v, scales, window_left, sinks)
            result, found = result.squeeze(2), found.squeeze(2)
        else:
            result, found = plan.attend(q.transpose(0, 1).unsqueeze(0), k, v, scales, window_left, sinks)
            result, found = result[0].transpose(0, 1), found[0].T
        return _flashinfer.given_back(result, found, out, lse, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """One query a sequence, over a paged cache."""

    _BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    _CAUSAL = None

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
        q_len_per_req: int = 1,
        **steering: Any,
    ) -> None:
        """Sequence ``i`` has the pages ``indices[indptr[i] : indptr[i + 1]]``, the last filled with ``last_page_len[i]`` tokens.
        ``q_len_per_req`` queries of each are its last tokens."""
        del rope_scale, rope_theta
        _flashinfer.refuse_unknown(steering)
        if self._steady is not None and self._planned is not None and self._planned.q_len != q_len_per_req:
            before = self._planned.q_len
            raise ValueError(f"q_len_per_req is {q_len_per_req}, but graphs of this wrapper have {before}; use a wrapper for each")
        side = _flashinfer.paged(indptr, indices, last_page_len, page_size)
        if q_len_per_req != 1:
            side |= _flashinfer.packed("q", _flashinfer.rows_of(q_len_per_req, last_page_len.numel()))
        self._planned = _flashinfer.Plan(
            self._side(side),
            (num_qo_heads, num_kv_heads),
            (head_dim, head_dim),
            page_size=page_size,
            causal=q_len_per_req != 1,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type or _flashinfer.of_queries(data_type, o_data_type), kv_data_type or data_type or q_data_type, o_data_type),
            q_len=q_len_per_req,
            steering=steering,
        )

    begin_forward = plan


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Decoding with ``use_cuda_graph=True``."""

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *arguments: Any,
    global_override_indptr_cpu: Tensor | None = None,
    **options: Any,
) -> None:
    """``wrapper.plan(…)``, which servers put in its place. The host's copy of ``indptr`` spares a copy from the device."""
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu[: last_page_len.numel() + 1]
    # Of the class: the wrapper's own may be this function.
    BatchDecodeWithPagedKVCacheWrapper.plan(wrapper, indptr, indices, last_page_len, *arguments, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
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
        _flashinfer.refuse_unknown(steering)
        side = _flashinfer.paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        side |= _flashinfer.packed("q", qo_indptr)
        masks = _flashinfer.masks(qo_indptr, side["seqused_k"], side["page_table"].size(1) * page_size, custom_mask, packed_custom_mask)
        self._planned = _flashinfer.Plan(
            self._side(side | masks),
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo or head_dim_qk),
            page_size=page_size,
            causal=causal and not masks,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type, kv_data_type or q_data_type, o_data_type),
            steering=steering,
        )

    begin_forward = plan


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
        _flashinfer.refuse_unknown(steering)
        side = _flashinfer.packed("q", qo_indptr) | _flashinfer.packed("k", kv_indptr)
        keys = kv_indptr[1:] - kv_indptr[:-1]
        masks = _flashinfer.masks(qo_indptr, keys, side["max_seqlen_k"], custom_mask, packed_custom_mask)
        self._planned = _flashinfer.Plan(
            self._side(side | masks),
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal and not masks,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode,
            data_types=(q_data_type, kv_data_type or q_data_type, o_data_type),
            steering=steering,
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
        **steering: Any,
    ) -> Any:
        """Attention of packed tensors, ``[tokens, heads, dim]``."""
        del enable_pdl
        _flashinfer.refuse_unknown(steering)
        plan, scales = self._plan(), (q_scale, k_scale, v_scale)
        done = plan.straight(q, k, v, scales, window_left, sinks, return_lse)
        if done is not None:
            return _flashinfer.given_back(*done, out, lse, return_lse)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        result, found = plan.attend(q, k, v, scales, window_left, sinks)
        return _flashinfer.given_back(result[0].transpose(0, 1), found[0].T, out, lse, return_lse)


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
    o_dtype: Any = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    **steering: Any,
) -> Any:
    """Queries of one sequence, ``[tokens, heads, dim]``, over its keys and values."""
    del rope_scale, rope_theta
    _flashinfer.refuse_unknown(steering)
    if _flashinfer.checked_layout(kv_layout) == "HND":
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
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        o_data_type=o_dtype,
    )
    return wrapper.run(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks, return_lse=return_lse)
