"""What type checkers must say of a program that uses the package. Checked, never run: ``mypy --strict`` and pyright."""
# pyright: strict

from __future__ import annotations

from typing import Any

from typing_extensions import assert_type

import evosdpa


class Tensor:
    """Of any library: results are of the kind of the queries."""


def program(q: Tensor, flag: bool) -> None:
    assert_type(evosdpa.sdpa(q, q, q), Tensor)
    assert_type(evosdpa.sdpa(q, q, q, q, 0.0, True, scale=0.5, enable_gqa=True, precision="high", fallback=True), Tensor)
    assert_type(evosdpa.flash_attn_func(q, q, q, causal=True, window_size=(3, 0), softcap=2.0), Tensor)
    assert_type(evosdpa.flash_attn_func(q, q, q, return_lse=True), tuple[Tensor, Any])
    assert_type(evosdpa.flash_attn_func(q, q, q, return_softmax_lse=True, causal=True), tuple[Tensor, Any])
    assert_type(evosdpa.flash_attn_func(q, q, q, return_attn_probs=True), tuple[Tensor, Any])
    assert_type(evosdpa.flash_attn_func(q, q, q, return_lse=flag), Any)
    assert_type(evosdpa.flash_attn_varlen_func(q, q, q, q, q, 8, 8, causal=True), Tensor)
    assert_type(evosdpa.flash_attn_varlen_func(q, q, q, q, return_softmax_lse=True, page_table=q), tuple[Tensor, Any])
    assert_type(evosdpa.flash_attn_with_kvcache(q, q, q, cache_seqlens=q), Tensor)
    assert_type(evosdpa.flash_attn_with_kvcache(q, q, q, q, q, rotary_cos=q, return_softmax_lse=True), tuple[Tensor, Any])
    assert_type(evosdpa.bench("tiny", device="cpu"), dict[str, Any])
    assert_type(evosdpa.__version__, str)
    with evosdpa.patch(fallback=False) as patched:
        assert_type(patched, evosdpa.patch)
    # What is wrong is said: an unused ignore is an error of its own.
    evosdpa.flash_attn_func(q, q, q, softcapp=2.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    evosdpa.sdpa(q, q, q, is_causal="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@evosdpa.patch()
def decorated(x: int) -> str:
    return str(x)


assert_type(decorated(1), str)
