"""What is right, in float64 and plain NumPy, and inputs by family."""

from __future__ import annotations

import numpy

FAMILIES = (
    "normal",
    "uniform",
    "large-logits",
    "one-hot",
    "ties",
    "constant-rows",
    "denormals",
    "zeros",
    "max-values",
)


def attention(q, k, v, *, scale=None, left=-1, right=-1, bottom_right=False):
    """``(out, lse)`` of ``[batch, heads, sequence, dim]`` arrays; rows without a visible key give 0 and -inf."""
    q, k, v = (numpy.asarray(x, numpy.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    queries, keys = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = numpy.einsum("bhqd,bhkd->bhqk", q, k) * scale
    offset = keys - queries if bottom_right else 0
    distance = numpy.arange(keys)[None, :] - numpy.arange(queries)[:, None] - offset
    visible = numpy.ones_like(distance, bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    scores = numpy.where(visible, scores, -numpy.inf)
    highest = scores.max(axis=-1, keepdims=True)
    shift = numpy.where(numpy.isfinite(highest), highest, 0.0)
    weights = numpy.exp(scores - shift)
    total = weights.sum(axis=-1, keepdims=True)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        out = numpy.einsum("bhqk,bhkd->bhqd", weights, v) / numpy.where(total == 0, 1.0, total)
        lse = (shift + numpy.log(total))[..., 0]
    return out, lse


def inputs(family, shapes, seed=0, largest=65504.0, smallest=2.0**-20):
    """Q, K and V of these shapes in float64. ``largest`` and ``smallest`` are limits of the type they will be rounded to."""
    rng = numpy.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    if family == "uniform":
        q, k, v = (rng.uniform(-1, 1, shape) for shape in shapes)
    elif family == "large-logits":
        q = 40.0 * q
    elif family == "one-hot":
        group, keys = q.shape[1] // k.shape[1], k.shape[2]
        k = numpy.sign(k)
        chosen = numpy.arange(q.shape[2]) * 7 % keys
        q = 4.0 * k.repeat(group, axis=1)[:, :, chosen]
    elif family == "ties":
        k = k[:, :, numpy.arange(k.shape[2]) % 4]
    elif family == "constant-rows":
        q, k, v = (numpy.broadcast_to(x[..., :1], x.shape).copy() for x in (q, k, v))
    elif family == "denormals":
        for x in (q, k, v):
            x[..., ::2] *= smallest
    elif family == "zeros":
        q, k, v = (numpy.zeros(shape) for shape in shapes)
    elif family == "max-values":
        v = numpy.sign(v) * largest
    return q, k, v


def worst(got, wanted, rounding, value_scale=1.0):
    """The largest error, as a share of what is allowed: 1e-3 of V's size and the output's own rounding."""
    got, wanted = numpy.asarray(got, numpy.float64), numpy.asarray(wanted)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert not numpy.isnan(got).any(), "NaN in the output"
    allowed = 1e-3 * value_scale + rounding * numpy.abs(wanted)
    return float((numpy.abs(got - wanted) / allowed).max(initial=0.0))
