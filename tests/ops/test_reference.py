"""The reference of softmax, cross-entropy, norms and rope: scalar loops and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn
from cupyattn import LayerNormGrads, reference, vjp
from cupyattn.reference import rope, rope_backward, softmax, softmax_backward


def test_softmax_of_special_values():
    inf, nan = np.inf, np.nan
    x = [[0.0, -inf], [-inf, -inf], [nan, 0.0], [inf, 0.0], [1e308, -1e308]]
    expected = [[1.0, 0.0], [0.0, 0.0], [nan, nan], [nan, nan], [1.0, 0.0]]
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(softmax(x), expected)
        assert softmax(np.empty((3, 0))).shape == (3, 0)
        assert softmax_backward(np.empty((3, 0)), np.empty((3, 0))).shape == (3, 0)


RNG = np.random.default_rng(0)
MASK = RNG.random((3, 5)) < 0.7
MASK[1] = False  # with causality and this, rows without a column
SOFTMAX_OPTIONS = {
    "plain": {},
    "scaled": {"scale": -1.5},
    "masked": {"mask": MASK},
    "all of it": {
        "scale": 0.7,
        "mask": MASK,
        "bias": RNG.standard_normal((2, 1, 5)),
        "causal": True,
    },
}


@pytest.mark.parametrize("name", SOFTMAX_OPTIONS)
def test_softmax_matches_scalar_loops(name):
    x, options = RNG.standard_normal((2, 3, 5)), SOFTMAX_OPTIONS[name]
    mask = np.broadcast_to(options.get("mask", True), x.shape)
    bias = np.broadcast_to(options.get("bias", 0.0), x.shape)
    weights = np.zeros(x.shape)
    for b, i, j in np.ndindex(x.shape):
        if mask[b, i, j] and not (options.get("causal") and j > i + 5 - 3):
            weights[b, i, j] = math.exp(options.get("scale", 1.0) * x[b, i, j] + bias[b, i, j])
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        expected = weights / np.where(total, total, 1)
        np.testing.assert_allclose(softmax(x, **options), expected, rtol=1e-12)
        np.testing.assert_allclose(
            reference.log_softmax(x, **options), np.log(expected), atol=1e-12
        )
        np.testing.assert_allclose(reference.logsumexp(x, **options), np.log(total[..., 0]))


@pytest.mark.parametrize("name", SOFTMAX_OPTIONS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_gradients_match_finite_differences(function, name):
    """The public functions and their vjp rules, in float64."""
    x, direction = RNG.standard_normal((2, 2, 3, 5))
    call = getattr(cupyattn, function)
    out, pullback = vjp(call, x, **SOFTMAX_OPTIONS[name])
    dout = np.where(np.isneginf(out), 0.0, RNG.standard_normal(out.shape))
    (dx,) = pullback(dout)
    step = 1e-5
    with np.errstate(invalid="ignore"):
        moved = call(x + step * direction, **SOFTMAX_OPTIONS[name]) - call(
            x - step * direction, **SOFTMAX_OPTIONS[name]
        )
    difference = (np.where(np.isneginf(out), 0.0, moved) * dout).sum() / (2 * step)
    np.testing.assert_allclose((dx * direction).sum(), difference, rtol=1e-7, atol=1e-9)
    if "bias" in SOFTMAX_OPTIONS[name] and function != "logsumexp":
        backward = getattr(cupyattn, f"{function}_backward")
        np.testing.assert_allclose(
            backward(dout, out), dx / SOFTMAX_OPTIONS[name]["scale"], atol=1e-12
        )


def test_vjp_of_logsumexp_refuses_the_bias():
    x = RNG.standard_normal((3, 5))
    with pytest.raises(
        TypeError, match=r"wrt names 'bias', which is bias of logsumexp, which has gradients of x"
    ):
        vjp(cupyattn.logsumexp, x, bias=x, wrt=("bias",))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 1), (2, 1, 5), (1, 1, 1), (2, 3, 5)])
def test_bias_gradient_matches_finite_differences(name, shape):
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 2, 3, 5))
    bias, direction = rng.standard_normal((2, *shape))
    options = {"scale": -1.5, "mask": rng.random((3, 5)) < 0.7}
    function = getattr(cupyattn, name)

    def total(step):
        out = function(x, bias=bias + step * direction, **options)
        return float((np.where(np.isneginf(out), 0.0, out) * dout).sum())

    _, pullback = vjp(lambda b: function(x, bias=b, **options), bias)
    (dbias,) = pullback(dout)
    assert dbias.shape == shape
    difference = (total(1e-5) - total(-1e-5)) / 2e-5
    np.testing.assert_allclose((dbias * direction).sum(), difference, rtol=1e-6, atol=1e-8)


@pytest.mark.deep
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_matches_torch(name, masked):
    """With a mask and causality, the first of six rows sees four of nine columns."""
    torch = pytest.importorskip("torch")
    x = RNG.standard_normal((6, 9))
    mask = RNG.random((6, 9)) < 0.8
    mask[:, 0] = True
    given, seen = torch.tensor(x, requires_grad=True), mask & np.tri(6, 9, 3, dtype=bool)
    scores = given.masked_fill(torch.tensor(~seen), -np.inf) if masked else given
    result = getattr(torch, name)(scores, dim=-1)
    expected = result.detach().numpy()
    dout = np.where(np.isfinite(expected), RNG.standard_normal(expected.shape), 0)
    (gradient,) = torch.autograd.grad(result, given, torch.tensor(dout))
    options = {"causal": True, "mask": mask} if masked else {}
    out, pullback = vjp(getattr(cupyattn, name), x, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(pullback(dout)[0], gradient.numpy(), rtol=1e-9, atol=1e-12)


LOGITS = RNG.standard_normal((3, 4, 7)) * 3
LABELS = RNG.integers(0, 7, (3, 4))
LABELS[0, 1] = LABELS[2, 3] = -100
LOSS_OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "with z": {"z_loss": 0.03},
    "both": {"label_smoothing": 0.1, "z_loss": 0.01},
    "another index": {"ignore_index": 3},
}


@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_losses_match_scalar_loops(name):
    options = LOSS_OPTIONS[name]
    ignored = options.get("ignore_index", -100)
    labels = np.where(LABELS == -100, ignored, LABELS)
    smoothing, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    losses, lse = reference.cross_entropy(LOGITS, labels, reduction="none", **options)
    for at in np.ndindex(labels.shape):
        row = [float(value) for value in LOGITS[at]]
        log_sum = math.log(sum(map(math.exp, row)))
        share = [smoothing / 7] * 7
        share[labels[at] % 7] += 1 - smoothing
        loss = sum(p * (log_sum - value) for p, value in zip(share, row, strict=True))
        expected = 0.0 if labels[at] == ignored else loss + z * log_sum**2
        assert losses[at] == pytest.approx(expected, rel=1e-12)
        assert lse[at] == pytest.approx(log_sum, rel=1e-12)
    counted = np.count_nonzero(labels != ignored)
    for reduction, expected in (("sum", losses.sum()), ("mean", losses.sum() / counted)):
        found, _ = reference.cross_entropy(LOGITS, labels, reduction=reduction, **options)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSS_OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_cross_entropy_gradients_match_finite_differences(name, reduction, return_lse):
    """The vjp rule in float64, with and without the gradient of lse."""
    ignored = LOSS_OPTIONS[name].get("ignore_index", -100)
    labels = np.where(LABELS == -100, ignored, LABELS)
    options = {**LOSS_OPTIONS[name], "reduction": reduction, "return_lse": return_lse}
    direction = RNG.standard_normal(LOGITS.shape)
    results, pullback = vjp(cupyattn.cross_entropy, LOGITS, labels, **options)
    several = results if return_lse else (results,)
    weights = tuple(RNG.standard_normal(np.shape(result))[()] for result in several)
    given = tuple(map(np.asarray, weights))
    dlogits, dlabels = pullback(given if return_lse else given[0])
    assert dlabels is None

    def scalar(step: float) -> float:
        found = cupyattn.cross_entropy(LOGITS + step * direction, labels, **options)
        pairs = zip(found if return_lse else (found,), weights, strict=True)
        return sum(float((result * weight).sum()) for result, weight in pairs)

    difference = (scalar(1e-5) - scalar(-1e-5)) / 2e-5
    np.testing.assert_allclose((dlogits * direction).sum(), difference, rtol=1e-7)


@pytest.mark.deep
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_matches_torch(reduction):
    torch = pytest.importorskip("torch")
    logits = torch.tensor(LOGITS.reshape(-1, 7), requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor(LABELS.reshape(-1)), reduction=reduction, label_smoothing=0.1
    )
    options = {"reduction": reduction, "label_smoothing": 0.1}
    flat = LOGITS.reshape(-1, 7), LABELS.reshape(-1)
    loss, pullback = vjp(cupyattn.cross_entropy, *flat, **options)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
    dloss = RNG.standard_normal(np.shape(loss))
    (gradient,) = torch.autograd.grad(expected, logits, torch.tensor(dloss))
    np.testing.assert_allclose(
        pullback(np.asarray(dloss))[0], gradient.numpy(), rtol=1e-9, atol=1e-12
    )


NORM_PROBLEMS = st.fixed_dictionaries(
    {
        "centred": st.booleans(),
        "arrays": st.sets(st.sampled_from(("weight", "bias", "residual"))),
        "length": st.sampled_from((1, 2, 9, 33)),
        "rows": st.integers(1, 4),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def norm_arrays(centred, arrays, length, rows, seed):
    """Return float64 arrays by name, None for absent ones."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, length), "dout": (rows, length)}
    shapes |= dict.fromkeys(("weight", "bias"), (length,))
    shapes |= dict.fromkeys(("residual", "dtotal"), (rows, length))
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    absent = {"weight", "bias", "residual"} - arrays | ({"bias"} if not centred else set())
    return found | dict.fromkeys(absent) | ({"dtotal": None} if "residual" in absent else {})


def call_norm(centred, given_arrays, **options):
    """Return out and the sum, or x without a residual."""
    positional = [given_arrays["x"], given_arrays["weight"]]
    if centred:
        positional.append(given_arrays["bias"])
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    if not centred:
        options["weight_offset"] = 0.5
    residual = given_arrays["residual"]
    found = function(*positional, residual=residual, eps=0.01, **options)
    return found if residual is not None else (found, given_arrays["x"])


@given(NORM_PROBLEMS)
def test_norms_match_scalar_loops(options):
    arrays = norm_arrays(**options)
    out, total = call_norm(options["centred"], arrays)
    offset = 0.0 if options["centred"] else 0.5
    for row, x in enumerate(arrays["x"]):
        items = [float(v) for v in x]
        if arrays["residual"] is not None:
            items = [a + float(b) for a, b in zip(items, arrays["residual"][row], strict=True)]
        np.testing.assert_allclose(total[row], items, rtol=1e-15)
        mean = math.fsum(items) / len(items) if options["centred"] else 0.0
        square = math.fsum((v - mean) ** 2 for v in items) / len(items)
        expected = [(v - mean) / math.sqrt(square + 0.01) for v in items]
        if arrays["weight"] is not None:
            expected = [v * (offset + w) for v, w in zip(expected, arrays["weight"], strict=True)]
        if arrays["bias"] is not None:
            expected = [v + b for v, b in zip(expected, arrays["bias"], strict=True)]
        np.testing.assert_allclose(out[row], expected, rtol=1e-12, atol=1e-12)


@given(NORM_PROBLEMS)
def test_norm_gradients_match_finite_differences(options):
    """With a residual, the backward reads the sum, and dx is the gradient of both inputs."""
    centred, arrays = options["centred"], norm_arrays(**options)
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    names = [name for name in ("x", "weight", "bias") if centred or name != "bias"]
    named = {"eps": 0.01} | ({} if centred else {"weight_offset": 0.5})
    wrt = () if arrays["residual"] is None else ("residual",)
    named |= {name: arrays[name] for name in wrt}
    result, pullback = vjp(function, *(arrays[name] for name in names), wrt=wrt, **named)
    out = result[0] if wrt else result
    assert out.shape == arrays["x"].shape
    found = pullback((arrays["dout"], arrays["dtotal"]) if wrt else arrays["dout"])
    gradients = dict(zip(names, found, strict=False)) | (found[-1] if wrt else {})

    def loss(name, step):
        moved = arrays | {name: arrays[name] + step}
        out, total = call_norm(centred, moved)
        more = 0.0 if arrays["dtotal"] is None else (arrays["dtotal"] * total).sum()
        return (arrays["dout"] * out).sum() + more

    for name, gradient in gradients.items():
        if arrays[name] is None:
            assert gradient is None
            continue
        direction = np.random.default_rng(options["seed"]).standard_normal(arrays[name].shape)
        h = 1e-5
        difference = (loss(name, h * direction) - loss(name, -h * direction)) / (2 * h)
        derivative = (gradient * direction).sum()
        np.testing.assert_allclose(derivative, difference, rtol=1e-5, atol=1e-6 * arrays["x"].size)


def test_gradient_of_a_residual_is_that_of_x():
    x, residual, dout = np.random.default_rng(0).standard_normal((3, 4, 8))
    (_, total), pullback = vjp(cupyattn.layer_norm, x, residual=residual, wrt=("residual",))
    dx, more = pullback((dout, None))
    assert more["residual"] is dx
    stats = cupyattn.layer_norm(x, residual=residual, return_stats=True)[2:]
    expected = cupyattn.layer_norm_backward(dout, total, None, *stats)
    np.testing.assert_array_equal(dx, expected.dx)
    dx, _ = pullback((None, dout))  # the sum alone
    np.testing.assert_array_equal(dx, dout)
    (_, again, mean, rstd), _ = vjp(cupyattn.layer_norm, x, residual=residual, return_stats=True)
    assert mean.shape == rstd.shape == (4,)
    np.testing.assert_array_equal(again, total)


def test_statistics_use_the_rounded_sum():
    """1 + 2^-11 is 1 in float16: the sum has no variance left."""
    x = np.ones((1, 4), np.float16)
    residual = np.array([[2.0**-11, 0, 2.0**-12, 0]], np.float16)
    out, total, mean, rstd = cupyattn.layer_norm(x, residual=residual, return_stats=True)
    assert (total == 1).all()
    assert not out.any()
    assert mean[0] == 1
    assert rstd[0] == np.float32(1e-5**-0.5)


@pytest.mark.deep
@pytest.mark.parametrize("centred", [True, False])
def test_norms_match_torch(centred):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 5, 33))
    arrays = [x, *rng.standard_normal((2, 33))][: 3 if centred else 2]
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    name = "layer_norm" if centred else "rms_norm"
    expected = getattr(torch.nn.functional, name)(tensors[0], (33,), *tensors[1:], eps=1e-6)
    expected.backward(torch.tensor(dout))
    out, *stats = getattr(cupyattn, name)(*arrays, eps=1e-6, return_stats=True)
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-12, atol=1e-12)
    options = {"bias": arrays[2]} if centred else {}
    grads = getattr(cupyattn, f"{name}_backward")(dout, *arrays[:2], *stats, **options)
    for gradient, tensor in zip(grads, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("accumulate", [False, True])
def test_norm_gradients_go_into_given_arrays(accumulate):
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 4))
    weight = np.ones(4)
    _, mean, rstd = cupyattn.layer_norm(x, weight, return_stats=True)
    plain = cupyattn.layer_norm_backward(dout, x, weight, mean, rstd)
    given_grads = LayerNormGrads(np.full((3, 4), 5.0), np.full(4, 5.0))
    found = cupyattn.layer_norm_backward(
        dout, x, weight, mean, rstd, grads=given_grads, accumulate=accumulate
    )
    assert found.dx is given_grads.dx
    assert found.dbias is None
    np.testing.assert_allclose(found.dx, plain.dx + 5 * accumulate)
    np.testing.assert_allclose(found.dweight, plain.dweight + 5 * accumulate)


def rope_tables(positions, pairs):
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(1, pairs + 1)
    return np.cos(angles), np.sin(angles)


def test_rope_is_a_complex_product_of_each_pair():
    rng = np.random.default_rng(0)
    x, pairs = rng.standard_normal((2, 5, 3, 10)), 4
    cos, sin = rope_tables(20, pairs)
    positions = rng.integers(0, 20, (2, 5))
    result = rope(x, cos, sin, positions)
    for b, s, h, m in np.ndindex(2, 5, 3, pairs):
        t = positions[b, s]
        turned = complex(x[b, s, h, m], x[b, s, h, m + pairs]) * complex(cos[t, m], sin[t, m])
        np.testing.assert_allclose(
            (result[b, s, h, m], result[b, s, h, m + pairs]), (turned.real, turned.imag)
        )
    np.testing.assert_array_equal(result[..., 2 * pairs :], x[..., 2 * pairs :])


def test_rope_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 1, 8))
    cos, sin = rope_tables(40, 4)
    products = [
        (rope(q, cos, sin, [i]) * rope(k, cos, sin, [i + 9])).sum() for i in range(0, 30, 3)
    ]
    np.testing.assert_allclose(products, products[0])


def test_rope_backward_is_the_transpose_and_the_inverse():
    rng = np.random.default_rng(2)
    x, dout = rng.standard_normal((2, 2, 6, 3, 8))
    cos, sin = rope_tables(6, 3)
    positions = np.arange(6)
    forward = rope(x, cos, sin, positions)
    np.testing.assert_allclose(
        (forward * dout).sum(), (x * rope_backward(dout, cos, sin, positions)).sum()
    )
    np.testing.assert_allclose(rope_backward(forward, cos, sin, positions), x, atol=1e-14)


def test_rope_of_float16_returns_float64_and_keeps_its_input():
    x = np.ones((1, 2, 1, 4), np.float16)
    cos, sin = rope_tables(2, 2)
    assert rope(x, cos, sin, [1, 0]).dtype == np.float64
    assert (x == 1).all()
    assert rope(np.ones((1, 0, 1, 4)), cos, sin, np.arange(0)).shape == (1, 0, 1, 4)


@pytest.mark.parametrize("position", [-1, 2])
def test_rope_positions_outside_the_tables_raise(position):
    with pytest.raises(IndexError, match="within the 2 rows"):
        rope(np.ones((1, 1, 1, 4)), *rope_tables(2, 2), [position])


@pytest.mark.deep
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_matches_complex_products_of_torch(interleaved):
    """A pair of features is a complex number; features beyond the pairs stay."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x, dout = rng.standard_normal((2, 2, 5, 3, 10))
    cos, sin = rope_tables(9, 4)
    positions = rng.integers(0, 9, (2, 5))
    given = torch.tensor(x, requires_grad=True)
    rotated, rest = given[..., :8], given[..., 8:]
    axes = (4, 2) if interleaved else (2, 4)
    pairs = rotated.reshape(2, 5, 3, *axes)
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turns = torch.complex(torch.tensor(cos), torch.tensor(sin))[torch.tensor(positions)]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns[:, :, None])
    turned = turned if interleaved else turned.transpose(-1, -2)
    expected = torch.cat((turned.reshape(2, 5, 3, 8), rest), dim=-1)
    options = {"positions": positions, "interleaved": interleaved}
    out, pullback = vjp(cupyattn.rope, x, cos, sin, **options)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(expected, given, torch.tensor(dout))
    np.testing.assert_allclose(pullback(dout)[0], gradient.numpy(), rtol=1e-12, atol=1e-15)
