import numpy as np
import pytest

import cupyattn
from cupyattn import vjp
from cupyattn.reference import rope, rope_backward


def tables(positions, pairs):
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(1, pairs + 1)
    return np.cos(angles), np.sin(angles)


def test_is_a_complex_product_of_each_pair():
    rng = np.random.default_rng(0)
    x, pairs = rng.standard_normal((2, 5, 3, 10)), 4
    cos, sin = tables(20, pairs)
    positions = rng.integers(0, 20, (2, 5))
    result = rope(x, cos, sin, positions)
    for b, s, h, m in np.ndindex(2, 5, 3, pairs):
        t = positions[b, s]
        turned = complex(x[b, s, h, m], x[b, s, h, m + pairs]) * complex(cos[t, m], sin[t, m])
        np.testing.assert_allclose(
            (result[b, s, h, m], result[b, s, h, m + pairs]), (turned.real, turned.imag)
        )
    np.testing.assert_array_equal(result[..., 2 * pairs :], x[..., 2 * pairs :])


def test_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 1, 8))
    cos, sin = tables(40, 4)
    products = [
        (rope(q, cos, sin, [i]) * rope(k, cos, sin, [i + 9])).sum() for i in range(0, 30, 3)
    ]
    np.testing.assert_allclose(products, products[0])


def test_backward_is_the_transpose_and_the_inverse():
    rng = np.random.default_rng(2)
    x, dout = rng.standard_normal((2, 2, 6, 3, 8))
    cos, sin = tables(6, 3)
    positions = np.arange(6)
    forward = rope(x, cos, sin, positions)
    np.testing.assert_allclose(
        (forward * dout).sum(), (x * rope_backward(dout, cos, sin, positions)).sum()
    )
    np.testing.assert_allclose(rope_backward(forward, cos, sin, positions), x, atol=1e-14)


def test_float16_comes_out_as_float64_and_the_input_is_untouched():
    x = np.ones((1, 2, 1, 4), np.float16)
    cos, sin = tables(2, 2)
    assert rope(x, cos, sin, [1, 0]).dtype == np.float64
    assert (x == 1).all()
    assert rope(np.ones((1, 0, 1, 4)), cos, sin, np.arange(0)).shape == (1, 0, 1, 4)


@pytest.mark.parametrize("position", [-1, 2])
def test_positions_outside_the_tables_raise(position):
    with pytest.raises(IndexError, match="within the 2 rows"):
        rope(np.ones((1, 1, 1, 4)), *tables(2, 2), [position])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_product_of_torchs_complex_numbers_is_the_same(interleaved):
    """A pair of features is a complex number; features beyond the pairs stay."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x, dout = rng.standard_normal((2, 2, 5, 3, 10))
    cos, sin = tables(9, 4)
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
