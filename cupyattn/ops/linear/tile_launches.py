"""The launches of a product on tensor cores, whole or in parts whose sums follow."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cupyattn.ops.linear import kernels_tensor_core as configs
from cupyattn.ops.linear.implementations import Launches
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.linear.tiles import Product, Tiling, whole_vector
from cupyattn.runtime.by_name import ABSENT, Step
from cupyattn.runtime.card import Card


def product_launches(
    product: Product,
    tiling: Tiling,
    card: Card,
    operands: Mapping[str, str],
    *,
    result: tuple[str, Matrix],
    addend: str,
    added: Matrix | None = None,
) -> Launches:
    """Plan result = A B + addend, of which `operands` names the arrays.

    `added` is the addend where it is another array than the result.
    """
    name, matrix = result
    added = added or matrix
    split, out_vec = tiling.splits > 1, whole_vector(matrix.vector, added.vector)
    ctas, params = product.geometry(card.arch, tiling)
    params["out_stride"], params["addend_stride"] = matrix.leading, added.leading
    specialisation = product.specialise(card.arch, tiling.shape, out_vec, split=split)
    last = {"result": name, "addend": addend}
    if not split:
        names = {**operands, **last, "partials": ABSENT}
        return Launches((Step.of(specialisation, ctas, product.passed(params), renamed=names),))
    partials = f"{name}_partials"
    names = {**operands, "partials": partials, "result": ABSENT, "addend": ABSENT}
    step = Step.of(specialisation, ctas, product.passed(params), renamed=names)
    rows, columns, parts = product.a.rows, product.b.columns, tiling.splits
    vec = configs.SPLIT_VEC if out_vec > 1 else 1
    sums = configs.split_sums(vec)
    absent = dict.fromkeys(("b", "preactivation"), ABSENT)
    threads = -(-rows * columns // vec)
    after = Step.of(
        sums,
        -(-threads // sums.threads),
        *(rows, columns, parts, added.leading, 0, matrix.leading),
        renamed={"partials": partials, **last, **absent},
    )
    return Launches((step, after), {partials: rows * columns * parts})


def forward_in_parts(
    problem: LinearProblem,
    product: Product,
    tiling: Tiling,
    card: Card,
    operands: Mapping[str, str],
) -> Launches:
    """Plan a forward by parts of its sum, perhaps one, then all that follows their sum."""
    columns = problem.outer
    ctas, params = product.geometry(card.arch, tiling)
    vec = whole_vector(problem.weight_columns)
    specialisation = product.specialise(card.arch, tiling.shape, vec, split=True)
    names = {**operands, "partials": "forward_partials", "result": ABSENT, "addend": ABSENT}
    step = Step.of(specialisation, ctas, product.passed(params), renamed=names)
    items = math.gcd(columns, problem.vector("out", "residual", "preactivation", "b"))
    vec = configs.SPLIT_VEC if items % configs.SPLIT_VEC == 0 else 1
    strides = [
        problem.matrices[name].leading if name in problem.matrices else 0
        for name in ("residual", "preactivation", "out")
    ]
    sums = configs.split_sums(vec, problem.scalar_activation, paired=problem.gated)
    threads = -(-problem.rows * columns // vec)
    last = Step.of(
        sums,
        -(-threads // sums.threads),
        *(problem.rows, columns, tiling.splits, *strides),
        renamed={"partials": "forward_partials", "addend": "residual", "result": "out"},
    )
    size = product.a.rows * product.b.columns * tiling.splits
    return Launches((step, last), {"forward_partials": size})
