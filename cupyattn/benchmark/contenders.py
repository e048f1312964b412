"""What the attention benchmarks time: one contender is one way to compute a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.arrays import Array
from cupyattn.benchmark.attention.cases import OPTIONS, PLAIN, Arguments, Arrays, Case
from cupyattn.benchmark.torch_peer import TAKES, TORCH, torch_backward_call, torch_call
from cupyattn.gradients import AttentionGrads
from cupyattn.kernels.configs.tables import round_up

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way to compute a case: by a kernel of the library, or by a peer."""

    labels: dict[str, Any]
    """What tells it from the others in a row: ``implementation``, ..."""
    prepare: Callable[[Case, Arrays, Arguments, Any], Call]
    """Makes the call that is timed, with all that it needs allocated by the array library."""
    flops: Callable[[Case, str], float]
    """The work of a case with an option."""
    options: tuple[str, ...] = (PLAIN, *OPTIONS)
    """What it has; the others are left out."""
    refusals: tuple[type[Exception], ...] = (NotImplementedError, MemoryError)
    """What it says of a call that it cannot make. Another error, as of a fault, is the end."""


def forward_contenders(implementations: Iterable[str], torch: Any = None) -> list[Contender]:
    """Return `attention` by each implementation, and by PyTorch if it is given."""
    contenders = [
        Contender({"implementation": name}, partial(_forward, name), Case.flops)
        for name in implementations
    ]
    if torch is not None:
        contenders.append(_peer(partial(torch_call, torch), {}, Case.flops))
    return contenders


def _forward(
    implementation: str, case: Case, arrays: Arrays, arguments: Arguments, xp: Any
) -> Call:
    q, k, v, out = arrays.q, arrays.k, arrays.v, arrays.out
    return lambda: cupyattn.attention(q, k, v, out=out, implementation=implementation, **arguments)


def backward_contenders(
    implementations: Iterable[str],
    deterministic: Sequence[bool],
    torch: Any = None,
) -> list[Contender]:
    """Return `attention_backward` by each implementation, and PyTorch's if it is given.

    "flash" is there once for each item of `deterministic`. The others do the same either way, and
    are there once, with the first.
    """
    contenders = [
        Contender(
            {"implementation": name, "deterministic": mode},
            partial(_backward, name, mode),
            Case.backward_flops,
        )
        for name in implementations
        for mode in (deterministic if name == "flash" else deterministic[:1])
    ]
    if torch is not None:
        labels = {"deterministic": None}
        contenders.append(_peer(partial(torch_backward_call, torch), labels, Case.backward_flops))
    return contenders


def _backward(
    implementation: str,
    deterministic: bool,
    case: Case,
    arrays: Arrays,
    arguments: Arguments,
    xp: Any,
) -> Call:
    """Gradients into given arrays with a given workspace, of the results of flash attention."""
    q, k, v, dout, out, lse = arrays
    cupyattn.attention(q, k, v, return_lse=True, out=(out, lse), **arguments)
    grads = AttentionGrads(*map(xp.empty_like, (q, k, v)), *(
        xp.empty_like(arguments[name]) if name in arguments else None for name in ("bias", "sinks")
    ))  # fmt: skip
    size = workspace_bytes(case, deterministic=deterministic, bias=arguments.get("bias"))
    if "rotary" in arguments:
        size += round_up(q.nbytes, 256) + round_up(k.nbytes, 256)
    workspace = xp.empty(size, np.uint8)
    return lambda: cupyattn.attention_backward(
        dout, q, k, v, out, lse, implementation=implementation, deterministic=deterministic,
        grads=grads, workspace=workspace, **arguments,
    )  # fmt: skip


def workspace_bytes(case: Case, *, deterministic: bool, bias: Array | None = None) -> int:
    """Return how much scratch memory `attention_backward` documents for a case.

    Examples
    --------
    >>> case = Case(8, 32, 2048, 80, 80, "float16", causal=True, window=0)
    >>> workspace_bytes(case, deterministic=False) / 1e6
    171.966464
    """
    heads = case.batch * case.heads
    if case.dtype != "float16":
        return 4 * heads * case.seqlen
    rows = heads * round_up(case.seqlen, 64)
    pieces = [8 * rows]
    if not deterministic:
        pieces.append(4 * rows * round_up(case.head_dim, 8))
    if bias is not None:
        pieces.append(4 * (heads * case.seqlen**2 if deterministic else int(bias.size)))
    return sum(round_up(piece, 256) for piece in pieces)


def _peer(
    call: Callable[[Arrays, Arguments], Call],
    labels: dict[str, Any],
    flops: Callable[[Case, str], float],
) -> Contender:
    return Contender(
        {"implementation": TORCH, **labels},
        lambda case, arrays, arguments, xp: call(arrays, arguments),
        flops,
        TAKES,
        (RuntimeError,),  # no kernel for the combination; no room
    )
