"""FlashAttention's functions for packed sequences and caches."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _binding, _exchange, _given, _native, _side, _window, _words

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Cached, Packed

Array = TypeVar("Array")


@overload
def flash_attn_varlen_func(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: Literal[False] = False,
    return_softmax_lse: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: Unpack[Packed],
) -> Array: ...
@overload
def flash_attn_varlen_func(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: Literal[True],
    return_lse: bool = False,
    **options: Unpack[Packed],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_varlen_func(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: Literal[True],
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Packed],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_varlen_func(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    return_lse: Literal[True],
    **options: Unpack[Packed],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Packed],
) -> Any: ...
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    page_table: Any = None,
    block_table: Any = None,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    learnable_sink: Any = None,
    precision: str = "default",
) -> Any:
    """Attention of packed sequences, with the meaning of FlashAttention's ``flash_attn_varlen_func``.

    Tensors are ``[tokens, heads, head dimension]``, all sequences one behind the other; ``cu_seqlens_q`` and
    ``cu_seqlens_k`` (int32, one more than there are sequences) say where each begins. ``seqused_q`` and ``seqused_k`` say
    how many of a sequence's tokens count. ``causal`` and ``window_size`` are aligned bottom-right, sequence by sequence. A
    query that sees no key, and a token that belongs to no sequence, gives zeros.

    With ``page_table`` (or ``block_table``), keys and values are ``[pages, page size, heads, head dimension]``, and
    ``seqused_k`` or ``cu_seqlens_k`` says how many each sequence has. Without either they may be ``[batch, tokens, heads, dim]``,
    of which ``seqused_k`` count.

    With ``return_softmax_lse``, ``return_attn_probs`` or ``return_lse`` the result is ``(out, lse)``, ``lse`` float32
    ``[heads, tokens]``.

    ``q_descale`` and the like, ``[batch, key/value heads]``, are read for tensors of 8-bit codes alone: float8_e4m3fn, int8,
    and uint8 around 128. ``s_aux`` (or ``learnable_sink``) are sink logits, one a head. ``num_splits``, ``pack_gqa``, ``deterministic`` and
    ``sm_margin`` change no result, and nothing else either: a result never depends on how work is divided. Everything after
    ``max_seqlen_k`` is given by name: the versions of FlashAttention differ in the order.

    >>> import numpy, evosdpa
    >>> x = numpy.arange(5, dtype=numpy.float32).reshape(5, 1, 1)
    >>> cu_seqlens = numpy.array([0, 2, 5], numpy.int32)  # two sequences, of two and three tokens
    >>> evosdpa.flash_attn_varlen_func(0 * x, 0 * x, x, cu_seqlens, cu_seqlens, 3, 3)[:, 0, 0].tolist()
    [0.5, 0.5, 3.0, 3.0, 3.0]
    """
    with_lse = return_softmax_lse or return_attn_probs or return_lse
    if learnable_sink is not None:
        s_aux, learnable_sink = _given.one_of(s_aux=s_aux, learnable_sink=learnable_sink), None
    window = _window.flash_window(causal, window_size)
    high = _high(precision)
    if (
        not _binding.compiling()
        and page_table is None
        and block_table is None
        and not dropout_p
        and qv is None
        and type(max_seqlen_q) is int
        and type(max_seqlen_k) is int
    ):
        lists = (cu_seqlens_q, cu_seqlens_k, None, seqused_q, seqused_k, None, None, None, None)
        longest = (max_seqlen_q, max_seqlen_k)
        scales = (k_descale, v_descale)
        scores = _scores(softcap, attention_chunk, alibi_slopes, s_aux)
        done = _native.straight_cache(
            (q, k, v), None, None, lists, scales, longest, softmax_scale, window, True, with_lse, high, False, None, scores
        )
        if done is not None:
            return done
    lib = _given.library(q)
    if lib is None:
        return _exchange.again(flash_attn_varlen_func, locals())
    _given.refuse(qv, dropout_p)
    table = _given.one_of(page_table=page_table, block_table=block_table)
    _given.expect(lib, q, 3, q=q)
    if table is None and cu_seqlens_k is None and getattr(k, "ndim", 4) != 4:
        raise ValueError("cu_seqlens_k is missing: packed keys need it; else give a page_table, or k and v as [batch, tokens, heads, head dimension]")
    packed = table is None and cu_seqlens_k is not None
    _given.expect(lib, q, 3 if packed else 4, k=k, v=v)
    batch = _given.count(lib, q, "cu_seqlens_q", cu_seqlens_q) - 1
    _given.integers(lib, q, batch + 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _given.integers(lib, q, batch, seqused_q=seqused_q, seqused_k=seqused_k)
    side: _side.Side = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": _given.longest("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    if table is not None:
        _given.check_table(lib, q, table)
        if seqused_k is None and cu_seqlens_k is not None:
            side["seqused_k"] = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        side["page_table"] = table
    elif packed:
        side |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": _given.longest("max_seqlen_k", cu_seqlens_k, max_seqlen_k)}
    side |= _given.scores(lib, q, batch, softcap, attention_chunk, alibi_slopes, s_aux)
    side |= _given.scales(lib, q, k, v, batch, q_descale, k_descale, v_descale)
    (q,) = lib.rows(q)
    if table is None:
        k, v = (x[None] if packed else x for x in lib.rows(k, v))
    q = q[None]
    tensors = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = lib.attend(*tensors, softmax_scale, window, with_lse, high, side)
    out = out.swapaxes(1, 2)[0]
    return (out, lse[0]) if with_lse else out


@overload
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[Cached],
) -> Array: ...
@overload
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[Cached],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    return_softmax_lse: bool = False,
    **options: Unpack[Cached],
) -> Any: ...
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    precision: str = "default",
) -> Any:
    """Attention over a cache, with the meaning of FlashAttention's ``flash_attn_with_kvcache``.

    ``q`` is ``[batch, queries, heads, head dimension]``, or packed with ``cu_seqlens_q`` and ``max_seqlen_q``; the caches are
    ``[batch, room, heads, dim]``, or ``[pages, page size, heads, dim]`` with a ``page_table`` (``block_table``).
    ``cache_seqlens``, a number or int32 ``[batch]``, says how many tokens each sequence holds; ``cache_leftpad`` how many of
    them come before its first key; ``cache_batch_idx`` which block of the cache, or row of the page table, is its own.

    New ``k`` and ``v`` (``[batch, new, heads, dim]``, or packed with ``cu_seqlens_k_new``) are written into the cache *in
    place* behind them first, and attended like all others. With ``rotary_cos`` and ``rotary_sin`` (``[positions, rotary
    dimension / 2]``) new keys and the queries are turned first, from position ``cache_seqlens`` (or ``rotary_seqlens``) on;
    without ``causal``, a window or a chunk all queries are at the first position.

    With ``return_softmax_lse`` the result is ``(out, lse)``, ``lse`` float32 ``[batch, heads, queries]`` or ``[heads, tokens]``.

    A full cache, a page that is not there, and two new tokens at one place raise ``ValueError`` before anything is written. On a
    GPU only the device knows: with ``EVOSDPA_CHECK=1`` in the environment they raise the same, else such tokens are left out.
    ``scheduler_metadata``, ``num_splits``, ``pack_gqa`` and ``sm_margin`` change no result, and nothing else either.

    >>> import numpy, evosdpa
    >>> cache = numpy.zeros((1, 4, 1, 1), numpy.float32)
    >>> for step in range(3):
    ...     new = numpy.full((1, 1, 1, 1), step, numpy.float32)
    ...     out = evosdpa.flash_attn_with_kvcache(0 * new, 0 * cache, cache, 0 * new, new, cache_seqlens=step)
    >>> cache.ravel().tolist(), float(out[0, 0, 0, 0])
    ([0.0, 1.0, 2.0, 0.0], 1.0)
    """
    window = _window.flash_window(causal, window_size)
    high = _high(precision)
    if type(cache_seqlens) is int:
        cache_seqlens = _given.for_each(q, k_cache, cu_seqlens_q, cache_seqlens)
    if (
        not _binding.compiling()
        and qv is None
        and (page_table is None or block_table is None)
        and (k is None) == (v is None)
        and (rotary_cos is None) == (rotary_sin is None)
        and (rotary_cos is None or not getattr(rotary_cos, "requires_grad", False))
        and (k is not None or cu_seqlens_k_new is None)
        and type(cache_seqlens) is not int
    ):
        done = _native.straight_cache(
            (q, k_cache, v_cache),
            None if k is None else (k, v),
            None if rotary_cos is None else (rotary_cos, rotary_sin),
            (
                cu_seqlens_q,
                None,
                cu_seqlens_k_new,
                None,
                cache_seqlens,
                cache_leftpad,
                cache_batch_idx,
                rotary_seqlens,
                block_table if page_table is None else page_table,
            ),
            (k_descale, v_descale),
            (max_seqlen_q, None),
            softmax_scale,
            window,
            rotary_interleaved,
            return_softmax_lse,
            high,
            False,
            None,
            _scores(softcap, attention_chunk, alibi_slopes, s_aux),
        )
        if done is not None:
            return done
    lib = _given.library(q)
    if lib is None:
        return _exchange.again(flash_attn_with_kvcache, locals())
    _given.refuse(qv, 0.0)
    table = _given.one_of(page_table=page_table, block_table=block_table)
    _given.expect(lib, q, 3 if cu_seqlens_q is not None else 4, q=q)
    _given.expect(lib, q, 4, k_cache=k_cache, v_cache=v_cache)
    batch = q.shape[0] if cu_seqlens_q is None else _given.count(lib, q, "cu_seqlens_q", cu_seqlens_q) - 1
    if isinstance(cache_seqlens, numbers.Integral):
        cache_seqlens = int(cache_seqlens)  # NumPy's
        if not 0 <= cache_seqlens < 2**31:
            raise ValueError(f"cache_seqlens is {cache_seqlens}, but must be the number of tokens that each sequence holds")
        cache_seqlens = lib.full_int32(batch, cache_seqlens, k_cache)
    _given.integers(lib, q, batch + 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    lists = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    _given.integers(lib, q, batch, **lists, rotary_seqlens=rotary_seqlens)
    if table is not None:
        _given.check_table(lib, q, table)
    _given.check_rotary(lib, q, k, rotary_cos, rotary_sin)
    filled = cache_seqlens
    side: _side.Side = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": None if cu_seqlens_q is None else _given.longest("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        "leftpad_k": cache_leftpad,
        "cache_batch_idx": cache_batch_idx,
        "page_table": table,
    }
    side |= _given.scores(lib, q, batch, softcap, attention_chunk, alibi_slopes, s_aux)
    side |= _given.scales(lib, q, k_cache, v_cache, batch, q_descale, k_descale, v_descale)
    (q,) = lib.rows(q)
    if k is not None:
        _given.check_fit(q, k_cache, k, table)
        filled = _given.held_then(lib, k_cache, k, v, cache_seqlens, cu_seqlens_k_new)
        rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": rotary_seqlens}
        place = {"cache_seqlens": cache_seqlens, "cu_seqlens_k_new": cu_seqlens_k_new, "page_table": table, "cache_batch_idx": cache_batch_idx}
        append = (k_cache, v_cache, *lib.rows(k, v), rotary_interleaved)
        turn = None
        if rotary_cos is not None:
            first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            advance = window[:2] != (-1, -1) or bool(attention_chunk)
            turn = (q, rotary_cos, rotary_sin, first, cu_seqlens_q, advance, rotary_interleaved)
        # Nothing is written if anything behind it would be refused.
        lib.check_step(append, {**place, **rotary}, turn, q, softmax_scale, window, {**side, "seqused_k": filled})
        if 0 not in k.shape:
            lib.append(*append, **place, **rotary)
        q = q if turn is None or 0 in q.shape else lib.rotate(*turn)
    elif v is not None or cu_seqlens_k_new is not None:
        raise ValueError("new values come with new keys: k is missing")
    side["seqused_k"] = filled
    packed = cu_seqlens_q is not None
    tensors = (x.swapaxes(1, 2) for x in (q[None] if packed else q, k_cache, v_cache))
    out, lse = lib.attend(*tensors, softmax_scale, window, return_softmax_lse, high, side)
    out = out.swapaxes(1, 2)
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_softmax_lse else out


def dense(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    window: _window.Window,
    dropout_p: float,
    qv: Any,
    extras: dict[str, Any],
    descale: tuple[Any, Any, Any],
    with_lse: bool,
    high: bool,
    fallback: bool,
) -> tuple[Any, Any]:
    """The part of ``flash_attn_func`` that changes scores or reads 8-bit codes."""
    lib = _given.library(q)
    assert lib is not None, "others have become tensors or arrays"
    try:
        _given.expect(lib, q, 4, q=q, k=k, v=v)
        _given.refuse(qv, dropout_p)
        side = _given.scores(lib, q, q.shape[0], extras["softcap"], extras["chunk"], extras["alibi_slopes"], extras["sinks"])
        side |= _given.scales(lib, q, k, v, q.shape[0], *descale)
        tensors = (x.swapaxes(1, 2) for x in lib.rows(q, k, v))
        out, lse = lib.attend(*tensors, softmax_scale, window, with_lse, high, side)
        return out.swapaxes(1, 2), lse
    except NotImplementedError:
        torch_side = _binding.torch_side
        if not fallback or torch_side is None or qv is not None or has_codes(q, k):
            raise
        from . import _plain

        tensor = torch_side.torch.as_tensor
        given = {name: tensor(extra) if hasattr(extra, "shape") else extra for name, extra in extras.items()}
        q_tensor, k_tensor, v_tensor = map(tensor, (q, k, v))
        out, lse = _plain.attention(q_tensor, k_tensor, v_tensor, softmax_scale, window, dropout_p, with_lse, **given)
        if isinstance(q, torch_side.Tensor):
            return out, lse
        return out.numpy(), None if lse is None else lse.numpy()


def _scores(softcap: float, chunk: int, alibi_slopes: Any, sinks: Any) -> tuple[Any, ...] | None:
    """What changes scores, as the short way takes it."""
    changed = softcap or chunk or alibi_slopes is not None or sinks is not None
    return (None, softcap, chunk, alibi_slopes, sinks) if changed else None


def has_codes(q: Any, k: Any) -> bool:
    """Whether one of them holds 8-bit codes."""
    return any(str(getattr(x, "dtype", "")).removeprefix("torch.") in _side.EIGHT_BIT for x in (q, k))


def _high(precision: str) -> bool:
    return precision != "default" and _words.is_high(precision)
