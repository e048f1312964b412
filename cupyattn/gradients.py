"""What backwards of several results return, and are given to write into."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.arrays import Array


class AttentionGrads(NamedTuple):
    """Gradients of attention's inputs, each of its input's shape.

    As the result of `attention_backward` it has all five, in this order: dbias and dsinks are None
    without bias and sinks. (What `vjp` returns gives one for each array that it was given by
    position: three for q, k and v.) As ``grads=`` None, the default, stands for an array that is to
    be made.

    Attributes
    ----------
    dq : array (B, Sq, H, D)
        Of the queries.
    dk : array (B, Sk, G, D)
        Of the keys, summed over the query heads of a group.
    dv : array (B, Sk, G, Dv)
        Of the values, likewise.
    dbias : array of bias's shape, or None
        Of the bias, summed over the axes that it broadcast along.
    dsinks : array (H,), or None
        Of the sinks.
    """

    # Array is Any, which takes None too: who reads a result need not ask whether dq is there.
    dq: Array = None
    dk: Array = None
    dv: Array = None
    dbias: Array | None = None
    dsinks: Array | None = None


class GatedGrads(NamedTuple):
    """Gradients of the inputs of swiglu or geglu.

    Attributes
    ----------
    dgate : array (..., N), or (..., 2N) where gate and up were packed
        Of gate, or of the packed array.
    dup : array (..., N), or None
        Of up, where it was given by itself.
    """

    dgate: Array = None
    dup: Array | None = None


class DropoutGrads(NamedTuple):
    """Gradients of dropout's inputs.

    Attributes
    ----------
    dx : array (..., N)
        Of x.
    dresidual : array (..., N)
        Of a residual, if there was one: the gradient of the result itself.
    """

    dx: Array = None
    dresidual: Array = None


class LayerNormGrads(NamedTuple):
    """Gradients of `layer_norm`'s inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x; with a residual of both terms of the sum.
    dweight : array (N,), or None
        Of the weight, summed over rows; None without weight.
    dbias : array (N,), or None
        Of the bias, likewise.
    """

    dx: Array = None
    dweight: Array | None = None
    dbias: Array | None = None


class RMSNormGrads(NamedTuple):
    """Gradients of `rms_norm`'s inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x; with a residual of both terms of the sum.
    dweight : array (N,), or None
        Of the weight, summed over rows; None without weight.
    """

    dx: Array = None
    dweight: Array | None = None


class LinearGrads(NamedTuple):
    """Gradients of linear's inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., K)
        Of the input.
    dw : array (K, N)
        Of the weight, summed over all rows of x; (K, 2 N) for a gated activation.
    db : array (N,), or None
        Of the bias, likewise; None without one.
    """

    dx: Array = None
    dw: Array = None
    db: Array | None = None


class SoftmaxGrads(NamedTuple):
    """Gradients of softmax's inputs, or of log_softmax's, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x.
    dbias : array of bias's shape
        Of the bias, summed over the axes that it broadcast along.
    """

    dx: Array = None
    dbias: Array = None


class LinearCrossEntropyGrads(NamedTuple):
    """Gradients of linear_cross_entropy's inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., K)
        Of the input.
    dw : array (K, V)
        Of the weight, summed over all rows of x.
    """

    dx: Array = None
    dw: Array = None
