"""What the model of Turing says of the rows that benchmarks measure.

Products: the simulated rate of each kernel's main loop, over those that a call launches. What
memory bounds: the card's bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays import adopt, dtype_of
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention.backward import attention_backward
from cupyattn.ops.attention.checks import backward_problem, forward_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import AttentionOptions, DropoutSeed
from cupyattn.ops.attention.problem import LSE_DTYPE
from cupyattn.ops.linear import backward as linear_gradients
from cupyattn.ops.linear import checks as linear_checks
from cupyattn.ops.linear.forward import linear_forward
from cupyattn.turing import MACHINES, DisassemblerError, Machine, analyse

Row = Mapping[str, Any]

_GEFORCE_HMMA_F32 = 16
_BACKWARD = 5
"""Products of a tile of scores that TFLOP/s of attention's backward count."""
_IN_TWO_PASSES, _IN_ONE = {"_dq": 3, "_dkdv": 4}, {"_dkdv": _BACKWARD}
"""Those that each of its kernels computes; the others of a call are left out."""
_LINEAR = {"linear_forward": 1, "linear_product": 1, "linear_dx": 1, "linear_dw": 1}


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
        launches = {
            "attention": self._attention,
            "attention_backward": self._attention_backward,
            "linear": self._linear,
        }
        if of_products(command, row):
            return launches[command](row)
        return None if row.get("gb_per_s") is None else float(self.machine.memory_gb_s)

    def _recorder(self) -> LaunchRecorder:
        recorder = LaunchRecorder(TURING, tensor_cores=self.machine.tensor_cores)
        recorder.multiprocessors = self.machine.multiprocessors
        return recorder

    def _attention(self, row: Row) -> float | None:
        recorder, operands = self._recorder(), adopt(_attention_arrays(row))
        problem = forward_problem(operands, _options(row))
        attention_forward(recorder, problem, operands, seed=DropoutSeed(0), return_lse=False)
        return self._together(recorder, {"attention_forward": 1}, 1)

    def _attention_backward(self, row: Row) -> float | None:
        arrays = _attention_arrays(row)
        q, v = arrays["q"], arrays["v"]
        arrays["dout"] = arrays["out"] = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        arrays["lse"] = np.empty((q.shape[0], q.shape[2], q.shape[1]), LSE_DTYPE)
        recorder, operands = self._recorder(), adopt(arrays)
        problem = backward_problem(operands, _options(row))
        modes = {"deterministic": "deterministic" in row["contender"], "accumulate": False}
        attention_backward(recorder, problem, operands, seed=DropoutSeed(0), **modes)
        two = any("_dq" in launch.specialisation.spec.entry for launch in recorder.launches)
        return self._together(recorder, _IN_TWO_PASSES if two else _IN_ONE, _BACKWARD)

    def _linear(self, row: Row) -> float | None:
        m, n, k = row["M"], row["N"], row["K"]
        dtype = dtype_of(row["dtype"])
        w = np.empty((n, k), dtype).T if row["layout"] == "nk" else np.empty((k, n), dtype)
        arrays = {"x": np.empty((m, k), dtype), "w": w, "b": np.empty(n, dtype)}
        recorder = self._recorder()
        if row["kind"] != "backward":
            operands = adopt(arrays)
            problem = linear_checks.forward_problem(operands, row["activation"], False)
            linear_forward(recorder, problem, operands)
            return self._together(recorder, _LINEAR, 1)
        z = {"preactivation": np.empty((m, n), dtype)} if row["activation"] else {}
        operands = adopt({"dout": np.empty((m, n), dtype), **arrays, **z})
        problem = linear_checks.backward_problem(operands, row["activation"], False)
        linear_gradients.linear_backward(recorder, problem, operands)
        return self._together(recorder, _LINEAR, 2)

    def _together(
        self, recorder: LaunchRecorder, executed: Mapping[str, int], counted: int
    ) -> float | None:
        """Return the rate of what is counted, of kernels that execute so many products each."""
        time = 0.0
        for launch in recorder.launches:
            entry = launch.specialisation.spec.entry
            products = sum(count for name, count in executed.items() if name in entry)
            rate = self._rate(launch.specialisation) if products else None
            time += 0 if rate is None else products / rate
        return counted / time if time else None

    def _rate(self, specialisation: Specialisation) -> float | None:
        """Return the TFLOP/s of a kernel's main loop; None for one without products."""
        if specialisation not in self._rates:
            main = analyse(specialisation, machine=self.machine).main
            per_cycle = None if main is None else main.flop_per_cycle
            rate = None if per_cycle is None else self.machine.tflops(per_cycle)
            self._rates[specialisation] = rate
        return self._rates[specialisation]


def _attention_arrays(row: Row) -> dict[str, np.ndarray]:
    """Return arrays of a row's shapes, whose memory nothing reads."""
    batch, length, heads = row["batch"], row["seqlen"], row["heads"]
    dims = {"q": row["head_dim"], "k": row["head_dim"], "v": row["head_dim_v"]}
    dtype = dtype_of(row["dtype"])
    return {name: np.empty((batch, length, heads, dim), dtype) for name, dim in dims.items()}


def _options(row: Row) -> AttentionOptions:
    causal = row["causal"] or row["option"] == "causal"
    return AttentionOptions(causal=causal, implementation=row["contender"].split()[1])


def rate_of(model: Model, command: str, row: Row) -> float | None:
    """Return a row's figure, None where there is no disassembler."""
    try:
        return model.figure(command, row)
    except DisassemblerError:
        return None


def with_model(command: str, rows: Sequence[Row], model: Model | None) -> list[dict[str, Any]]:
    """Return rows with ``modelled``, None where there is no model of them."""
    return [
        {**row, "modelled": None if model is None else model.figure(command, row)} for row in rows
    ]
