"""What the model of Turing says of the rows that benchmarks measure.

Products: the simulated rate of each kernel's main loop, over those that a call launches. What
memory bounds: the card's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.clock import Call
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.cupy_library import load_cupy
from cupyattn.functional.backend import running_on
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.spec import Specialisation
from cupyattn.quantized_weight import empty
from cupyattn.turing import MACHINES, DisassemblerError, Machine, analyse
from cupyattn.weight_formats import blocks_for

Row = Mapping[str, Any]

Prepare = Callable[[], Call]

_GEFORCE_HMMA_F32 = 16
_EXECUTED = {
    **{"attention_forward": 2, "attention_naive": 2, "attention_tiled": 2, "_dq": 3},
    **{"summed_dbias": 2, "backward_naive": 7},
    **{"linear_forward": 1, "linear_product": 1, "linear_dx": 1, "linear_dw": 1},
}
"""Products of a kernel, by a part of its entry; "_dkdv" has as many as "_dq" leaves it."""
_AGAIN = ("_dq", "summed_dbias", "backward_naive")
"""Parts of the entries of kernels that compute two products a second time."""


def machine_of(device: CudaDevice) -> Machine | None:
    """Return a Turing card as the model sees it; None for a GPU of another architecture.

    One that has no name in `MACHINES` is as its driver describes it; GeForce cards have half the
    rate of products with float32 sums.
    """
    if device.capability != TURING.number:
        return None
    named = " ".join(device.name.upper().split())
    for name, machine in MACHINES.items():
        if named.endswith(name.upper()):
            return machine
    attributes = load_cupy().cuda.Device(device.ordinal).attributes
    like = MACHINES["T4" if device.tensor_cores else "GTX 1650 Ti"]
    geforce = device.tensor_cores and "GEFORCE" in named
    bits, kilohertz = (
        attributes.get(name, 0) for name in ("GlobalMemoryBusWidth", "MemoryClockRate")
    )
    return replace(
        like,
        name=device.name,
        multiprocessors=device.multiprocessors,
        clock_mhz=attributes.get("ClockRate", 0) // 1000 or like.clock_mhz,
        memory_gb_s=round(2 * kilohertz * bits / 8 / 1e6) or like.memory_gb_s,
        hmma_f32=_GEFORCE_HMMA_F32 if geforce else like.hmma_f32,
    )


def of_products(command: str, row: Row) -> bool:
    """Tell whether a row's figure is that of its products, and not of its bytes.

    Examples
    --------
    >>> of_products("linear", {"kind": "large"}), of_products("linear", {"kind": "thin"})
    (True, False)
    """
    products = command in ("attention", "attention_backward", "linear")
    return products and row.get("kind") != "thin"


class Model:
    """The model of a card; kernels that several rows launch are analysed once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._rates: dict[Specialisation, float | None] = {}

    def figure(self, command: str, row: Row) -> float | None:
        """Return what a row's figure would be: TFLOP/s of products, or GB/s of what has those."""
        calls = {
            "attention": _attention,
            "attention_backward": _attention_backward,
            "linear": _linear,
        }
        if of_products(command, row):
            return self.rate(partial(calls[command], row))
        return None if row.get("gb_per_s") is None else float(self.machine.memory_gb_s)

    def rate(self, prepare: Prepare) -> float | None:
        """Return the TFLOP/s of the products that a call on NumPy arrays is asked for.

        Nothing reads or writes the arrays; its kernels take the time of their main loops.
        """
        recorder = LaunchRecorder(TURING, tensor_cores=self.machine.tensor_cores)
        recorder.multiprocessors = self.machine.multiprocessors
        with running_on(recorder):
            call = prepare()
            recorder.launches.clear()
            call()
        launched = [each.specialisation for each in recorder.launches]
        asked, executed = _products([each.spec.entry for each in launched])
        time = 0.0
        for specialisation, products in zip(launched, executed, strict=True):
            rate = self._rate(specialisation) if products else None
            time += 0 if rate is None else products / rate
        return asked / time if time else None

    def _rate(self, specialisation: Specialisation) -> float | None:
        """Return the TFLOP/s of a kernel's main loop; None for one without products."""
        if specialisation not in self._rates:
            main = analyse(specialisation, machine=self.machine).main
            per_cycle = None if main is None else main.flop_per_cycle
            rate = None if per_cycle is None else self.machine.tflops(per_cycle)
            self._rates[specialisation] = rate
        return self._rates[specialisation]


def _products(entries: Sequence[str]) -> tuple[int, list[int]]:
    """Return how many products kernels are asked for, and how many each executes.

    The backward of attention in two passes computes two of its five a second time, and so does the
    kernel for a bias that broadcasts. The naive backward computes two of its own a second time. A
    kernel that moves bytes next to products executes none.

    Examples
    --------
    >>> _products(["attention_forward"]), _products(["attention_backward_dkdv"])
    ((2, [2]), (5, [5]))
    >>> _products(["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq"])
    (5, [0, 4, 3])
    >>> _products(["attention_backward_dkdv", "attention_backward_summed_dbias"])
    (5, [5, 2])
    >>> _products(["attention_backward_naive"])
    (5, [7])
    """
    two_passes = any("_dq" in entry for entry in entries)
    executed = {**_EXECUTED, "_dkdv": 4 if two_passes else 5}
    of_each = [
        next((count for part, count in executed.items() if part in entry), 0) for entry in entries
    ]
    again = [part for part in _AGAIN if any(part in entry for entry in entries)]
    return sum(of_each) - 2 * len(again), of_each


def _attention(row: Row) -> Call:
    q, k, v = _attention_arrays(row)
    options = {"causal": _causal(row), "implementation": row["contender"].split()[1]}
    return partial(cupyattn.attention, q, k, v, **options)


def _attention_backward(row: Row) -> Call:
    q, k, v = _attention_arrays(row)
    dout, out = np.empty((2, *q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    return partial(
        cupyattn.attention_backward, dout, q, k, v, out, lse, causal=_causal(row),
        implementation=row["contender"].split()[1],
        deterministic="deterministic" in row["contender"],
    )  # fmt: skip


def _attention_arrays(row: Row) -> list[np.ndarray]:
    """Return q, k and v of a row."""
    of_all = row["batch"], row["seqlen"], row["heads"]
    dims = row["head_dim"], row["head_dim"], row["head_dim_v"]
    return [np.empty((*of_all, dim), dtype_of(row["dtype"])) for dim in dims]


def _causal(row: Row) -> bool:
    return bool(row["causal"] or row["option"] == "causal")


def _linear(row: Row) -> Call:
    m, n, k = row["M"], row["N"], row["K"]
    dtype, after = dtype_of(row["dtype"]), row["activation"]
    nk, name = row["layout"] == "nk", row.get("weights")
    stored: Any = np.empty((n, k) if nk else (k, n), dtype)
    if name is not None:
        stored = empty(blocks_for(name, k), n, k, np)
    w = stored.T if nk else stored
    if row["kind"] == "dx":
        return partial(cupyattn.linear, np.empty((m, n), dtype), w.T)
    x, b = np.empty((m, k), dtype), np.empty(n, dtype)
    if row["kind"] != "backward":
        return partial(cupyattn.linear, x, w, b, activation=after)
    z = np.empty((m, n), dtype) if after else None
    dout = np.empty((m, n), dtype)
    return partial(cupyattn.linear_backward, dout, x, w, b, activation=after, preactivation=z)


def rate_of(model: Model, command: str, row: Row) -> float | None:
    """Return a row's figure, None where there is no disassembler."""
    return _or_none(partial(model.figure, command, row))


def rate_of_call(model: Model, prepare: Prepare) -> float | None:
    """Return the rate of a call's products, None where there is no disassembler."""
    return _or_none(partial(model.rate, prepare))


def _or_none(ask: Callable[[], float | None]) -> float | None:
    try:
        return ask()
    except DisassemblerError:
        return None


def with_model(command: str, rows: Sequence[Row], model: Model | None) -> list[dict[str, Any]]:
    """Return rows with ``modelled``, None where there is no model of them."""
    return [
        {**row, "modelled": None if model is None else model.figure(command, row)} for row in rows
    ]
