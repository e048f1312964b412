"""A product with low-rank adapters beside its weight, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn import (
    DropoutGrads,
    LinearGrads,
    QuantizedWeight,
    dequantize,
    dropout,
    dropout_backward,
    linear,
    linear_backward,
)
from cupyattn.models.activations import activated
from cupyattn.models.loss import loss_dtype
from cupyattn.models.training.places import Gradients
from cupyattn.models.weights import Product
from cupyattn.ops.linear.weight_formats import rows_apart
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

_AT_ONCE = 1 << 24  # numbers of a weight that are merged at a time, in float32


class AdaptedProduct(NamedTuple):
    """A `Product` whose weight is frozen, and LoRA beside it: ``x W^T + bias + D(x) A^T B^T``.

    Hu et al., "LoRA: low-rank adaptation of large language models", arXiv:2106.09685, equation 3,
    with dropout D of what the adapters read. Modules whose rows one product has, such as q, k and
    v, have adapters of their own: their matrices A stand one above the other, so that x is read
    once, and their B, each times alpha / rank, are blocks of a B that is 0 elsewhere. They share a
    mask of dropout.

    Attributes
    ----------
    weight : array or QuantizedWeight (N, K)
    bias : array (N,), or None
    a : array (R, K)
        Of all adapters, R being the sum of their ranks.
    b : array (N, R)
    dropout_p : float
    seed : int, or None
        Of dropout.
    """

    weight: Array
    bias: Array | None
    a: Array
    b: Array
    dropout_p: float = 0.0
    seed: int | None = None

    def __call__(
        self,
        x: Array,
        /,
        *,
        activation: str | None = None,
        residual: Array | None = None,
        return_preactivation: bool = False,
    ) -> Any:
        """Return what `Product` does, with the adapters; either an activation or a residual."""
        low = linear(self._dropped(x), self.a.T)
        added = linear(low, self.b.T, residual=residual)
        out = preactivation = linear(x, self.weight.T, self.bias, residual=added)
        del added
        if activation is not None:
            out = activated(preactivation, activation)
        return (out, preactivation) if return_preactivation else out

    def backward(
        self, dout: Array, x: Array, gradients: Gradients, residual: Array | None = None
    ) -> Array:
        """Return dx, plus a residual; the adapters' gradients are added to `gradients`.

        With u = D(x) A^T: du = dout B, dB = dout^T u, dA = du^T D(x), dx = dout W + D'(du A).
        """
        dropped = self._dropped(x)
        of_b = linear_backward(dout, linear(dropped, self.a.T), self.b.T)
        gradients.add(self.b, of_b.dw.T)
        dx = linear(dout, self.weight, residual=residual)
        if self.dropout_p:
            of_a = linear_backward(of_b.dx, dropped, self.a.T)
            given = self.dropout_p, self.seed
            dropout_backward(of_a.dx, *given, grads=DropoutGrads(dx), accumulate=True)
        else:
            grads = LinearGrads(dx=dx)
            of_a = linear_backward(of_b.dx, x, self.a.T, grads=grads, accumulate=True)
        gradients.add(self.a, of_a.dw.T)
        return dx

    def merged(self, xp: Any) -> Product:
        """Return a product whose weight has taken the adapters over, rounded once."""
        wide = loss_dtype(self.a.dtype)
        a, weight = self.a.astype(wide, copy=False), xp.empty(self.weight.shape, self.a.dtype)
        step = max(1, _AT_ONCE // weight.shape[1])
        if isinstance(self.weight, QuantizedWeight):
            apart = rows_apart(self.weight.blocks, self.weight.inner)
            step = -(-step // apart) * apart
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            old = self.weight[rows]
            old = dequantize(old) if isinstance(old, QuantizedWeight) else old
            added = linear(self.b[rows].astype(wide), a, residual=old.astype(wide, copy=False))
            with np.errstate(over="ignore"):
                weight[rows] = added.astype(weight.dtype, copy=False)
        return Product(weight, self.bias)

    def _dropped(self, x: Array) -> Array:
        return dropout(x, self.dropout_p, self.seed) if self.dropout_p else x


def adapted_already() -> NotImplementedError:
    """Make the error of a model that has adapters already."""
    return error(
        NotImplementedError,
        "a model that has adapters",
        "what is trained is a model's own weights, or one LoraAdapters beside them",
        "pass the model itself, or what merged() returns",
    )
