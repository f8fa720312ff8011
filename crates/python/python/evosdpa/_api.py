"""The two functions, for every kind of tensor, and what holds for all calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from . import _arrays, _binding, _exchange, _flash, _given, _native, _window, _words

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Dense

Array = TypeVar("Array")


def set_batch_invariant(on: bool) -> bool:
    """Whether every call of this process from now on gives a sequence the same bits whatever else is in its batch.

    Says what was set before; ``EVOSDPA_BATCH_INVARIANT=1`` in the environment sets it at the start. On a CPU results are so in
    any case. On a GPU keys are then split by their own sequence's length instead of evenly over the SMs, which costs some speed,
    prompts more than decoding. What is left to PyTorch (``fallback``, :func:`patch`) is PyTorch's.

    >>> import evosdpa
    >>> before = evosdpa.set_batch_invariant(True)
    >>> evosdpa.set_batch_invariant(before)
    True
    """
    return _native.set_batch_invariant(on)


def sdpa(
    q: Array,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str = "default",
    fallback: bool = False,
) -> Array:
    """Attention with the meaning of ``torch.nn.functional.scaled_dot_product_attention``.

    Tensors are ``[batch, heads, sequence, head dimension]`` (or without the batch), in float32, float16 or bfloat16: torch
    tensors on a CPU or a GPU, NumPy arrays, or anything with DLPack (JAX, CuPy), also mixed. They are read where they lie; only
    a head dimension that is not contiguous is copied. The result is of the same kind as ``q``.

    ``is_causal`` masks from the top left, as PyTorch does: query ``i`` sees keys ``0 … i``. ``attn_mask`` may have any shape
    that spreads to ``[batch, heads, queries, keys]`` and any strides: booleans, of which False hides a key, or float32 or numbers
    of the type of ``q`` that are added to the scores. A ``BlockMask`` of ``torch.nn.attention.flex_attention`` is taken as well,
    with ``is_causal`` or without: blocks that it hides are not computed. A query that sees no key gives zeros. ``enable_gqa`` lets several query
    heads share a key/value head.

    ``precision="high"`` keeps every element of a float16 or bfloat16 result within 1e-3 and the rounding of its type, for any
    data: by default weights may be rounded before they meet V, as FlashAttention and cuDNN do.

    Dropout and gradients are not supported: they raise ``NotImplementedError``, or are left to torch with ``fallback=True``.
    Wrong shapes raise ``ValueError``, mixed types ``TypeError``.

    >>> import numpy, evosdpa
    >>> q = numpy.zeros((1, 2, 3, 8), numpy.float32)
    >>> v = numpy.arange(48, dtype=numpy.float32).reshape(1, 2, 3, 8)
    >>> float(evosdpa.sdpa(q, q, v)[0, 0, 0, 0])  # equal scores: the mean of 0, 8 and 16
    8.0
    >>> float(evosdpa.sdpa(q, q, v, is_causal=True)[0, 0, 1, 0])  # the second query sees two keys
    4.0
    >>> evosdpa.sdpa(q, q, v, dropout_p=0.1)
    Traceback (most recent call last):
    NotImplementedError: dropout_p is 0.1: evosdpa has no dropout; use 0.0 (model.eval()), or pass fallback=True to let torch compute it
    """
    high = precision != "default" and _words.is_high(precision)
    torch_side = _binding.torch_side
    if torch_side is not None:
        # With a mask there is more that may be torch's.
        if (attn_mask is None or not (is_causal or fallback)) and dropout_p == 0.0 and not _binding.compiling():
            scores = None if attn_mask is None else (attn_mask, 0.0, 0, None, None)
            done = torch_side.straight(q, k, v, scale, is_causal, enable_gqa, False, False, high, False, scores)
            if done is not None:
                result: Array = done
                return result
    if torch_side is not None and torch_side.are_tensors(q, k, v) and (attn_mask is None or not _exchange.is_foreign(attn_mask)):
        return cast(Array, torch_side.sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, high, fallback))
    if not _arrays.are_arrays(q, k, v) or not (attn_mask is None or _arrays.are_arrays(attn_mask)):
        return cast(Array, _exchange.again(sdpa, locals()))
    return cast(Array, _arrays.sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, high, fallback))


@overload
def flash_attn_func(
    q: Array,
    k: Any,
    v: Any,
    *,
    return_attn_probs: Literal[False] = False,
    return_softmax_lse: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: Unpack[Dense],
) -> Array: ...
@overload
def flash_attn_func(
    q: Array,
    k: Any,
    v: Any,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    return_lse: Literal[True],
    **options: Unpack[Dense],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_func(
    q: Array,
    k: Any,
    v: Any,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: Literal[True],
    return_lse: bool = False,
    **options: Unpack[Dense],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_func(
    q: Array,
    k: Any,
    v: Any,
    *,
    return_attn_probs: Literal[True],
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Dense],
) -> tuple[Array, Any]: ...
@overload
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Dense],
) -> Any: ...
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    learnable_sink: Any = None,
    precision: str = "default",
    fallback: bool = False,
) -> Any:
    """Attention with the meaning of FlashAttention's ``flash_attn_func``.

    Tensors are ``[batch, sequence, heads, head dimension]``; ``k`` and ``v`` may have fewer heads. ``causal`` aligns the last
    query with the last key. ``window_size`` is how many keys before and after its own position a query sees, -1 for no
    bound. A query that sees no key gives zeros.

    Everything after ``v`` is given by name: the versions of FlashAttention differ in the order.

    With ``return_softmax_lse``, ``return_attn_probs`` or ``return_lse`` the result is ``(out, lse)``, where ``lse`` is the
    log-sum-exp of each row's scores, float32 ``[batch, heads, queries]``.

    ``softcap``, ``attention_chunk``, ``alibi_slopes``, ``s_aux`` or ``learnable_sink`` (sink logits) and the scales of 8-bit tensors are as for
    :func:`flash_attn_varlen_func`, and so are the arguments that change no result. ``precision`` is as for :func:`sdpa`.
    Dropout and gradients raise ``NotImplementedError``, or are left to torch with ``fallback=True``.

    >>> import numpy, evosdpa
    >>> q = numpy.zeros((1, 2, 1, 8), numpy.float32)  # two queries …
    >>> k = numpy.zeros((1, 4, 1, 8), numpy.float32)  # … at the end of four keys
    >>> out, lse = evosdpa.flash_attn_func(q, k, k, causal=True, return_softmax_lse=True)
    >>> numpy.exp(lse).round(3).tolist()  # they see three and four keys
    [[[3.0, 4.0]]]
    """
    del num_splits, pack_gqa, deterministic, sm_margin  # no result depends on them
    high = precision != "default" and _words.is_high(precision)
    torch_side = _binding.torch_side
    with_lse = return_lse or return_attn_probs or return_softmax_lse
    if learnable_sink is not None:
        s_aux, learnable_sink = _given.one_of(s_aux=s_aux, learnable_sink=learnable_sink), None
    window = _window.flash_window(causal, window_size)
    plain = not softcap and not attention_chunk and alibi_slopes is None and s_aux is None and qv is None
    scores = None if plain else (None, softcap, attention_chunk, alibi_slopes, s_aux)
    side: Any = _arrays
    done: Any = None
    if torch_side is not None:
        if qv is None and dropout_p == 0.0 and not (scores and fallback) and not _binding.compiling():
            done = torch_side.straight(q, k, v, softmax_scale, window, True, True, with_lse, high, False, scores)
            if done is not None:
                return done
        if torch_side.are_tensors(q, k, v):
            side = torch_side
    if side is _arrays:
        if not _arrays.are_arrays(q, k, v):
            return _exchange.again(flash_attn_func, locals())
        if qv is None and dropout_p == 0.0 and not (scores and fallback):
            done = _native.straight(q, k, v, softmax_scale, window, True, True, with_lse, high, False, scores, True)
            if done is not None:
                return done
    if not plain or _flash.has_codes(q, k):
        extras = {"softcap": softcap, "chunk": attention_chunk, "alibi_slopes": alibi_slopes, "sinks": s_aux}
        descale = (q_descale, k_descale, v_descale)
        done = _flash.dense(q, k, v, softmax_scale, window, dropout_p, qv, extras, descale, with_lse, high, fallback)
    out, lse = done or side.flash_attention(q, k, v, softmax_scale, causal, window_size, dropout_p, with_lse, high, fallback)
    return (out, lse) if with_lse else out
