"""Many queries over a cache of integers, whose keys and values are gathered first."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays import Array
from cupyattn.errors import error, shown
from cupyattn.functional import attention, gather
from cupyattn.functional.outputs import named_out
from cupyattn.kv_cache.tables import StepTables

_OPTIONS = frozenset(
    {
        *("causal", "softmax_scale", "window_size", "softcap", "sinks", "alibi_slopes"),
        *("return_lse", "out", "workspace"),
    }
)
"""Those of `paged_attention`: `attention` would take more."""


def attend_gathered(
    q: Array, arrays: dict[str, Array], tables: StepTables, xp: Any, options: dict[str, Any]
) -> Any:
    """Attend from packed q (total, H, D), a sequence at a time; see `PagedKVCache.attend`.

    So no more is dequantised at once than one sequence, into q's dtype. For a prompt that costs
    little beside its products; the kernels that decode read the integers themselves.
    """
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"attend() got an unexpected keyword argument {unknown[0]!r}")
    window = options.get("window_size")
    tables.require_seen(window[0] if isinstance(window, tuple) and len(window) == 2 else None)
    with_lse = bool(options.get("return_lse"))
    options.pop("workspace", None)  # that of one call; here are as many as sequences
    results = {"out": q.shape} | ({"lse": (q.shape[1], q.shape[0])} if with_lse else {})
    given = named_out(options.pop("out", None), tuple(results))
    for name, array in given.items():
        _require_shape(name, array, results[name])
    slopes = options.get("alibi_slopes")
    out, lse = given.get("out"), given.get("lse")
    if out is None:
        out = xp.zeros(q.shape, q.dtype)
    if with_lse and lse is None:
        lse = xp.full(results["lse"], -xp.inf, "float32")
    for row, (begin, end, length) in enumerate(tables.spans()):
        if begin == end:
            continue
        own = slice(row, row + 1)
        k, v = gather(
            arrays["k"],
            arrays["v"],
            tables.block_table[own],
            tables.seqlens_k[own],
            max_seqlen_k=length,
            k_scales=arrays["k_scales"],
            v_scales=arrays["v_scales"],
            dtype=q.dtype,
        )
        if slopes is not None and len(slopes.shape) == 2:
            options["alibi_slopes"] = slopes[own]
        part = out[None, begin:end]
        target = part if lse is None else (part, lse[None, :, begin:end])
        attention(q[None, begin:end], k, v, out=target, **options)
    return out if lse is None else (out, lse)


def _require_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    found = getattr(array, "shape", None)
    if found != shape:
        raise error(
            TypeError if found is None else ValueError,
            f"{name} is {shown(array)}" if found is None else f"{name} has shape {found}",
            f"the result has shape {shape}",
            "pass an array of that shape, or none",
        )
