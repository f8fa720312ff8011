"""JAX arrays: computed where they lie and given back as JAX arrays, or refused by name. With torch installed and without."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy
import pytest

import evosdpa


def drawn(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def close(ours, wanted, tolerance=2e-5):
    assert isinstance(ours, jax.Array)
    numpy.testing.assert_allclose(numpy.asarray(ours, numpy.float32), numpy.asarray(wanted, numpy.float32), tolerance, tolerance)


def by_jax(q, k, v, **arguments):
    """``[batch, heads, sequence, dim]`` by JAX's own attention."""
    tensors = (x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(*tensors, **arguments).swapaxes(1, 2)


Q, K = (2, 4, 33, 16), (2, 2, 40, 16)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_types(dtype, tolerance):
    q, k, v = drawn(Q, K, K, dtype=dtype)
    out = evosdpa.sdpa(q, k, v, enable_gqa=True)
    assert out.dtype == q.dtype and out.devices() == q.devices()
    close(out, by_jax(q, k, v), tolerance)
    close(evosdpa.sdpa(q, q, q, is_causal=True), by_jax(q, q, q, is_causal=True), tolerance)


def test_masks_and_strides():
    q, k, v = drawn((2, 33, 4, 16), (2, 40, 4, 16), (2, 40, 4, 16))
    seen = jax.random.bernoulli(jax.random.key(1), 0.8, (33, 40))
    by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
    wanted = by_jax(*by_head, mask=seen)
    close(evosdpa.sdpa(*by_head, seen), wanted)
    close(evosdpa.sdpa(*by_head, numpy.asarray(seen)), wanted)
    close(evosdpa.sdpa(*by_head, jnp.where(seen, 0.0, -jnp.inf)), wanted)
    close(evosdpa.sdpa(*by_head, scale=jnp.float32(0.1)), by_jax(*by_head, scale=0.1))
    assert evosdpa.sdpa(*(x[:, :, :0] for x in by_head)).shape == (2, 4, 0, 16)
    out, lse = evosdpa.flash_attn_func(q, k, v, return_lse=True)
    close(out.swapaxes(1, 2), by_jax(*by_head))
    close(lse, jax.nn.logsumexp(jnp.einsum("bhqd,bhkd->bhqk", *by_head[:2]) / 4, -1))


def test_lengths_are_numbers_of_any_library():
    (x,) = (jax.random.normal(jax.random.key(3), (2, 5, 4, 16)),)
    wanted = evosdpa.flash_attn_with_kvcache(x, x, x, cache_seqlens=3)
    assert (evosdpa.flash_attn_with_kvcache(x, x, x, cache_seqlens=numpy.int64(3)) == wanted).all()


def test_kinds_may_be_mixed():
    q, k, v = drawn(Q, Q, Q)
    wanted = by_jax(q, k, v)
    close(evosdpa.sdpa(q, numpy.asarray(k), numpy.asarray(v)), wanted)
    out = evosdpa.sdpa(numpy.asarray(q), k, v)
    assert type(out) is numpy.ndarray
    close(jnp.asarray(out), wanted)
    with pytest.raises(TypeError, match="v is a list"):
        evosdpa.sdpa(q, k, v.tolist())
    with pytest.raises(TypeError, match="k is a MaskedArray"):
        evosdpa.sdpa(q, numpy.ma.masked_array(k), v)


def test_flash_attentions_functions():
    """Beside their results for NumPy, which other tests hold against the oracle."""
    q, k, v, cache, slopes = drawn((10, 4, 16), (10, 2, 16), (10, 2, 16), (3, 8, 2, 16), (4,))
    starts, held, table = (jnp.array(x, jnp.int32) for x in ([0, 4, 10], [5, 0, 8], [[2, 0], [1, 1], [0, 1]]))
    calls = [
        (evosdpa.flash_attn_func, (q[None], k[None], v[None]), {"softcap": 2.0, "alibi_slopes": slopes, "return_lse": True}),
        (evosdpa.flash_attn_varlen_func, (q, k, v, starts, starts, 6, 6), {"causal": True, "s_aux": slopes}),
        (evosdpa.flash_attn_with_kvcache, (q[:3, None], cache, cache), {"cache_seqlens": held, "return_softmax_lse": True}),
        (evosdpa.flash_attn_with_kvcache, (q[:3, None], cache, cache), {"cache_seqlens": held, "page_table": table}),
    ]
    for function, given, named in calls:
        ours = function(*given, **named)
        plain = function(*map(as_numpy, given), **{name: as_numpy(x) for name, x in named.items()})
        for one, other in zip(ours, plain) if isinstance(plain, tuple) else [(ours, plain)]:
            close(one, other, 1e-6)


def as_numpy(x):
    return numpy.asarray(x) if isinstance(x, jax.Array) else x


def test_caches_are_not_written_to():
    """What JAX holds never changes: it may be shared, or a constant of a program."""
    new, cache = jnp.ones((1, 1, 2, 16)), jnp.zeros((1, 8, 2, 16))
    with pytest.raises(TypeError, match="k_cache is a .*in place"):
        evosdpa.flash_attn_with_kvcache(new, cache, cache, new, new, cache_seqlens=jnp.array([3], jnp.int32))
    assert not cache.any()


def test_inside_of_transforms():
    q, k, v = drawn(Q, Q, Q)
    sdpa = lambda q, k, v: evosdpa.sdpa(q, k, v)  # noqa: E731
    for transformed in (
        jax.jit(sdpa),
        jax.vmap(sdpa),
        jax.grad(lambda *x: sdpa(*x).sum()),
        lambda *x: jax.jvp(sdpa, x, x),
        lambda *x: jax.eval_shape(sdpa, *x),
    ):
        with pytest.raises(TypeError, match="q is a .*Tracer.*inside jax.jit.*jax.pure_callback"):
            transformed(q, k, v)
    with pytest.raises(TypeError, match="attn_mask is a .*Tracer"):
        jax.jit(lambda mask: evosdpa.sdpa(q, k, v, mask))(jnp.ones((33, 33), bool))

    # What the message says to use.
    def called(q, k, v):
        shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return jax.pure_callback(evosdpa.sdpa, shape, q, k, v, vmap_method="sequential")

    close(jax.jit(called)(q, k, v), by_jax(q, k, v))
    close(jax.jit(jax.vmap(called))(q[:, None], k[:, None], v[:, None])[:, 0], by_jax(q, k, v))


def test_memory_that_is_gone():
    q, k, v = drawn(Q, Q, Q)
    donated = q + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    deleted = k + 0
    deleted.delete()
    for given in ((donated, k, v), (q, deleted, v)):
        with pytest.raises(ValueError, match="was deleted, or donated"):
            evosdpa.sdpa(*given)


def test_devices():
    q, k, v = drawn(Q, Q, Q)
    second = jax.devices()[1]
    out = evosdpa.sdpa(*(jax.device_put(x, second) for x in (q, k, v)))
    assert out.devices() == {second}
    close(out + jax.device_put(q, second), by_jax(q, k, v) + q)
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    spread = jax.device_put(q, jax.sharding.NamedSharding(mesh, spec))
    with pytest.raises(NotImplementedError, match="q is spread over 2 devices.*jax.shard_map"):
        evosdpa.sdpa(spread, spread, spread)

    def on_a_part(x):
        return jax.pure_callback(evosdpa.sdpa, jax.ShapeDtypeStruct(x.shape, x.dtype), x, x, x)

    mapped = jax.jit(jax.shard_map(on_a_part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    close(mapped(spread), by_jax(q, q, q))


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_other_types_are_refused(dtype):
    (q,) = drawn(Q)
    with pytest.raises(NotImplementedError, match=f"no kernel for .*{dtype}"):
        evosdpa.sdpa(*(q.astype(dtype),) * 3)
