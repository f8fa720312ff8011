# What the functions take by name besides what their overloads say. For type checkers: there is no such module at run time.

from typing import Any

from typing_extensions import TypedDict

class Scores(TypedDict, total=False):
    softmax_scale: float | None
    causal: bool
    qv: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    window_size: tuple[int, int]
    attention_chunk: int
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    alibi_slopes: Any
    s_aux: Any
    precision: str

class Dense(Scores, total=False):
    learnable_sink: Any
    deterministic: bool
    dropout_p: float
    fallback: bool

class Packed(Scores, total=False):
    seqused_q: Any
    seqused_k: Any
    deterministic: bool
    learnable_sink: Any
    page_table: Any
    block_table: Any
    dropout_p: float

class Cached(Scores, total=False):
    rotary_cos: Any
    rotary_sin: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    page_table: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    max_seqlen_q: int | None
    rotary_seqlens: Any
    rotary_interleaved: bool
    scheduler_metadata: Any
