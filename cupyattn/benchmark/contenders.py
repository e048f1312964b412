"""What the attention benchmarks time: one contender is one way to compute a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupyattn
from cupyattn.benchmark.attention_cases import OPTIONS, PLAIN, Arguments, Arrays, Case
from cupyattn.benchmark.torch_peer import TAKES, TORCH, torch_call

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
