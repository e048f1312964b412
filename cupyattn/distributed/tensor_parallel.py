"""Products over several ranks: each has some columns of a weight, or some of its rows.

A layer of two products gives each rank columns of the first weight and the same rows of the second
one: between them nothing is sent (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).
"""

from __future__ import annotations

import numpy as np

from cupyattn import LinearGrads, QuantizedWeight, linear, linear_backward
from cupyattn.distributed.checks import adopted, require_array, require_device, require_group
from cupyattn.distributed.group import Group
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def all_reduce(x: Array, /, *, group: Group) -> Array:
    """Sum an array over all ranks.

    Parameters
    ----------
    x : array
        Of one shape and dtype on all ranks.
    group : Group
        The ranks.

    Returns
    -------
    array
        A new array of that shape and dtype, with the same bits on all ranks: they add in one order,
        float16 and bfloat16 in float32, and round once.

    Raises
    ------
    TypeError, ValueError
        For what is no array or no group, and for an array on another device than its rank's.
    RankFailedError
        If a rank has failed, or did not come in time.

    Notes
    -----
    Each rank gathers the arrays of all, and adds them: for the few ranks of one host. The gradient
    of each rank's x is that of the result, where all ranks go on alike.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import distributed
    >>> distributed.run(
    ...     lambda group: distributed.all_reduce(np.arange(3.0) * group.rank, group=group), 3
    ... )[0]
    array([0., 3., 6.])
    """
    return _sum(x, group)


def column_linear(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    group: Group,
    activation: str | None = None,
) -> Array:
    """Compute a rank's columns of ``activation(x @ w + b)``.

    Parameters
    ----------
    x : array (..., K)
        The same on all ranks.
    w : array (K, N) or QuantizedWeight
        This rank's columns of the weight, such as ``shard(w, rank, ranks, axis=1,
        placement="contiguous")``; where the activation is gated those of gate, then those of up.
    b : array (N,), optional
        Its columns of the bias.
    group : Group
        The ranks.
    activation : optional
        As of `cupyattn.linear`.

    Returns
    -------
    array (..., N)
        Which `row_linear` takes.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `cupyattn.linear`, and for what is no group, or on another device than its rank's.

    Notes
    -----
    It is `cupyattn.linear`, and nothing is sent. What x has from all ranks is the sum of its
    gradients: see `column_linear_backward`.

    Examples
    --------
    A layer of two products over two ranks:

    >>> import numpy as np, cupyattn
    >>> from cupyattn import distributed
    >>> from functools import partial
    >>> rng = np.random.default_rng(0)
    >>> x, up, down = rng.standard_normal((3, 8, 8))
    >>> def of_rank(group):
    ...     own = partial(distributed.shard, rank=group.rank, ranks=2, placement="contiguous")
    ...     inner = distributed.column_linear(x, own(up, axis=1), group=group, activation="gelu")
    ...     return distributed.row_linear(inner, own(down, axis=0), group=group)
    >>> whole = cupyattn.linear(cupyattn.linear(x, up, activation="gelu"), down)
    >>> all(np.allclose(out, whole) for out in distributed.run(of_rank, 2))
    True
    """
    _taken(x, group)
    return linear(x, w, b, activation=activation)


def column_linear_backward(
    dout: Array,
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    group: Group,
    activation: str | None = None,
    preactivation: Array | None = None,
) -> LinearGrads:
    """Gradients of `column_linear` with respect to x, w and b.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to this rank's columns of the result.
    x, w, b, group, activation
        As given to `column_linear`.
    preactivation : optional
        As of `cupyattn.linear_backward`.

    Returns
    -------
    LinearGrads
        ``(dx, dw, db)``: dx is that of all ranks, the same on each; dw and db are of this rank's
        columns, dw None for a `QuantizedWeight`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RankFailedError
        As `cupyattn.linear_backward` and `all_reduce`.

    Notes
    -----
    A rank's share of dx is rounded to the dtype of x, and the sum once more.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> from cupyattn import distributed
    >>> x, w, dout = np.random.default_rng(0).standard_normal((3, 8, 8))
    >>> def of_rank(group):
    ...     own = [
    ...         distributed.shard(a, group.rank, 2, axis=1, placement="contiguous")
    ...         for a in (dout, w)
    ...     ]
    ...     return distributed.column_linear_backward(own[0], x, own[1], group=group).dx
    >>> whole = cupyattn.linear_backward(dout, x, w).dx
    >>> all(np.allclose(dx, whole) for dx in distributed.run(of_rank, 2))
    True
    """
    _taken(x, group)
    grads = linear_backward(dout, x, w, b, activation=activation, preactivation=preactivation)
    assert grads.dx is not None
    return grads._replace(dx=_sum(grads.dx, group))


def row_linear(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    group: Group,
    residual: Array | None = None,
) -> Array:
    """Compute ``x @ w + b + residual`` of which each rank has some of the K columns of x.

    Parameters
    ----------
    x : array (..., K)
        This rank's columns, as `column_linear` returns them.
    w : array (K, N) or QuantizedWeight
        The same rows of the weight.
    b : array (N,), optional
        The bias, whole and the same on all ranks: it is added once.
    group : Group
        The ranks.
    residual : array (..., N), optional
        The same on all ranks; added once.

    Returns
    -------
    array (..., N)
        The same bits on all ranks.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RankFailedError
        As `cupyattn.linear` and `all_reduce`.

    Notes
    -----
    A rank's product is rounded to the dtype of x; these, b and residual are summed as in
    `all_reduce`. Its backward is `cupyattn.linear_backward` on each rank, where nothing is sent:
    dout is the same on all, and so are db and the gradient of the residual, which is dout.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> from cupyattn import distributed
    >>> x, w = np.random.default_rng(0).standard_normal((2, 8, 8))
    >>> def of_rank(group):
    ...     rows = slice(4 * group.rank, 4 * group.rank + 4)
    ...     return distributed.row_linear(x[:, rows], w[rows], group=group)
    >>> all(np.allclose(out, x @ w) for out in distributed.run(of_rank, 2))
    True
    """
    _taken(x, group)
    product = linear(x, w)
    shapes = {"b": product.shape[-1:], "residual": product.shape}
    given = {"x": x, "b": b, "residual": residual}
    added = {name: each for name, each in adopted(given).arrays.items() if name != "x"}
    for name, array in added.items():
        if array.shape != shapes[name] or array.dtype != product.dtype:
            raise error(
                TypeError if array.shape == shapes[name] else ValueError,
                f"{name} is {array.dtype} {array.shape}",
                f"of this x and w it is {product.dtype} {shapes[name]}, the same on all ranks",
                "pass it whole, and convert it with .astype(...) where its dtype is another",
            )
    return _sum(product, group, *added.values())


def _taken(x: Array, group: Group) -> Array:
    """Take an array of this rank, and refuse what is none."""
    require_group(group)
    group.check()
    array, device_id = require_array(x)
    require_device(group, device_id)
    return array


def _sum(x: Array, group: Group, *added: Array) -> Array:
    """Add the arrays of all ranks, in their order, and then others; round once."""
    x = _taken(x, group)
    parts = group.all_gather(x)
    dtype = x.dtype
    exact: object = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    total = parts[0].astype(exact)
    for part in (*parts[1:], *added):
        total += part
    return total.astype(dtype, copy=False)
