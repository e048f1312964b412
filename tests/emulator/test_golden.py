"""The emulator against a GPU: the vectors of ``support/golden``, case by case.

They come from an H200 that executed PTX for compute_75 (its driver made machine code for sm_90 of
it), not from a Turing device: they show that the emulator executes PTX as NVIDIA does. The file's
metadata name the device, the driver and the PTX target.

Results agree bit for bit where the PTX ISA 8.8 fixes them. Elsewhere its notes on an instruction
say how far hardware may be off; the emulator rounds the float64 result to nearest, so it may differ
from hardware by that and half a unit in the last place. Any NaN equals any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.golden import vectors
from support.golden.atomics import ATOMICS, AtomicTable
from support.golden.case import Case
from support.golden.catalogue import CASES, TABLES
from support.golden.elementwise import Table, widened
from support.golden.warp_level import MMA, MMA_DEPTH, MMA_PROBLEMS, WARP_LEVEL, mma_case

from cupyattn import emulator
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.spec import Pointer, Specialisation

pytestmark = pytest.mark.nvrtc

# Relative errors over the whole range.
_RELATIVE = {
    "rsqrt.approx.f32": 2.0**-22.9,
    "rsqrt.approx.ftz.f32": 2.0**-22.9,
    "sqrt.approx.f32": 2.0**-23,
    "sqrt.approx.ftz.f32": 2.0**-23,
    "tanh.approx.f32": 2.0**-11,
    "ex2.approx.f16": 2.0**-9.9,
    "ex2.approx.f16x2": 2.0**-9.9,
    "ex2.approx.ftz.bf16": 2.0**-7 + 2.0**-9,  # and half a unit, here of float32
}

# In units in the last place of the result.
_UNITS = {"ex2.approx": 2, "rcp.approx": 1, "div.approx": 2, "div.full": 2}
_ABSOLUTE = {
    "tanh.approx.f16": 2.0**-10.987,
    "tanh.approx.f16x2": 2.0**-10.987,
    "tanh.approx.bf16": 2.0**-8 + 2.0**-9,
}


def unit_in_last_place(x: np.ndarray) -> np.ndarray:
    """Return the distance of float32 (or float16) numbers around finite `x`, as float64."""
    info = np.finfo(x.dtype)
    _, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(1.0, np.maximum(exponent - 1, info.minexp) - info.nmant)


def is_exact(opcode: str) -> bool:
    """Tell whether hardware must give the correctly rounded result."""
    return ".approx" not in opcode and ".full" not in opcode


def allowed_error(opcode: str, operand: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the largest distance of a hardware result from a correctly rounded one.

    Parameters
    ----------
    opcode : str
        Of an ``.approx`` or ``.full`` instruction.
    operand : array
        Its first operand.
    exact : array
        Correctly rounded results.
    """
    largest = np.finfo(exact.dtype).max
    exact = np.where(np.isnan(exact), exact.dtype.type(0), np.clip(exact, -largest, largest))
    size = np.abs(exact).astype(np.float64)
    last_place = unit_in_last_place(exact)
    root = ".".join(opcode.split(".")[:2])
    if opcode in _RELATIVE:
        error = _RELATIVE[opcode] * size
    elif opcode in _ABSOLUTE:
        error = np.full(size.shape, _ABSOLUTE[opcode])
    elif root in _UNITS:
        error = _UNITS[root] * last_place
    elif root == "lg2.approx":  # absolute near 1, where the result is near 0
        error = np.where((operand > 0.5) & (operand < 2), 2.0**-22, 2.0**-22 * size)
    elif root in ("sin.approx", "cos.approx"):  # nothing is promised beyond 100 pi
        angle = np.abs(operand.astype(np.float64))
        far = np.where(angle <= 100 * np.pi, 2.0**-14.7, np.inf)
        error = np.where(angle <= 2 * np.pi, 2.0**-20.5, far)
    else:
        raise KeyError(f"no error is known of {opcode}; find it in the PTX ISA and add it")
    if exact.dtype == np.float16:  # an H200 errs by a unit where results are subnormal
        error = np.maximum(error, last_place)
    return error + last_place / 2


_MIN_NORMAL = 2.0**-126
_OTHERS = [case for case in WARP_LEVEL if case not in MMA]


def emulate(
    specialisation: Specialisation, arch: Arch, ctas: int, arguments: Sequence[Any]
) -> None:
    """Run a kernel on the emulator, all checks on."""
    spec = specialisation.spec
    module = emulator.load(compile_ptx(specialisation, arch).code.decode())
    passed = [
        emulator.Argument(value, parameter.name, const=parameter.const)
        if isinstance(parameter, Pointer) and value is not None
        else value
        for value, parameter in zip(arguments, spec.parameters, strict=True)
    ]
    emulator.launch(
        module, spec.entry, ctas, specialisation.threads, passed, checks=emulator.Checks.all()
    )


@cache
def recorded() -> dict[str, np.ndarray]:
    return vectors.load()[0]


def differing(gpu: np.ndarray, emulated: np.ndarray) -> np.ndarray:
    """Return where two arrays differ: in their bits, but for the payload of NaN."""
    assert gpu.dtype == emulated.dtype
    assert gpu.shape == emulated.shape
    unsigned = f"u{gpu.itemsize}"
    differ = gpu.view(unsigned) != emulated.view(unsigned)
    if gpu.dtype.kind == "f":
        differ &= ~(np.isnan(gpu) & np.isnan(emulated))
    return differ


def unbounded(x: np.ndarray) -> np.ndarray:
    """Return float64, infinity as the power of 2 where `x` overflows: an error may lead there."""
    overflow = 2.0 ** np.finfo(x.dtype).maxexp
    return np.clip(x.astype(np.float64), -overflow, overflow)


def beyond(opcode: str, operand: np.ndarray, gpu: np.ndarray, emulated: np.ndarray) -> np.ndarray:
    """Return where results of an approximate instruction are further apart than documented."""
    with np.errstate(all="ignore"):  # conversion of signalling NaN
        allowed = allowed_error(opcode, operand, emulated)
        distance = np.abs(unbounded(gpu) - unbounded(emulated))
    either_nan = np.isnan(gpu) | np.isnan(emulated)
    wrong = np.where(either_nan, np.isnan(gpu) != np.isnan(emulated), distance > allowed)
    wrong &= np.isfinite(allowed)
    if ".ftz" in opcode:
        # An error may carry a result over the edge to the subnormals, where it becomes 0.
        edge = np.maximum(np.abs(gpu), np.abs(emulated)) <= np.float32(1.000001 * _MIN_NORMAL)
        subnormal = [(np.abs(x) < _MIN_NORMAL) & (x != 0) for x in (gpu, emulated)]
        wrong = (wrong & ~edge) | subnormal[0] | subnormal[1]
    return wrong


def complaint(name: str, wrong: np.ndarray, operands: Sequence[np.ndarray], gpu: np.ndarray,
              emulated: np.ndarray) -> str:  # fmt: skip
    """Say how many results are wrong, and show a few."""
    lines = [f"{name}: {np.count_nonzero(wrong)} of {wrong.size} are not the GPU's"]
    for index in np.argwhere(wrong)[:4]:
        at = tuple(index)
        shown = [f"{values[at[0]]!r}" for values in operands]
        lines.append(f"    {', '.join(shown)}: {gpu[at]!r} on the GPU, here {emulated[at]!r}")
    return "\n".join(lines)


def table_mismatches(
    table: Table, gpu_rows: np.ndarray, emulated_rows: np.ndarray
) -> dict[str, str]:
    """Return a complaint for each instruction whose results differ."""
    found = {}
    rows = zip(table.instructions, table.results(gpu_rows), table.results(emulated_rows),
               strict=True)  # fmt: skip
    for instruction, gpu, emulated in rows:
        operand = table.operands[0]
        if instruction.result == "f16x2":
            operand = operand.view(np.float16).reshape(-1, 2)
        elif table.types[0] == "bf16":
            operand = widened(operand)
        if is_exact(instruction.opcode):
            wrong = differing(gpu, emulated)
        else:
            wrong = beyond(instruction.opcode, operand, gpu, emulated)
        if wrong.any():
            found[instruction.name] = complaint(
                instruction.name, wrong, table.operands, gpu, emulated
            )
    return found


@cache
def emulated_table(name: str) -> np.ndarray:
    table = next(table for table in TABLES if table.name == name)
    return table.case.run(emulate)[f"{name}/results"]


def test_vectors_belong_to_these_cases() -> None:
    """Inputs and instructions are made anew here: they must be those of the capture."""
    _, metadata = vectors.load()
    here = {case.name: case.digest for case in CASES}
    assert metadata["digests"] == here, (
        "a case has changed since the vectors were captured: run support/golden/capture.py on a GPU"
    )
    assert metadata["ptx_target"] == "compute_75"
    assert sorted(recorded()) == sorted(
        f"{case.name}/{output}"
        for case in CASES
        for output in case.outputs
        if output not in case.scratch
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_instructions(table: Table) -> None:
    gpu, emulated = recorded()[f"{table.name}/results"], emulated_table(table.name)
    found = table_mismatches(table, gpu, emulated)
    assert not found, "\n".join(found.values())


@pytest.mark.parametrize("table", ATOMICS, ids=lambda table: table.name)
def test_atomics(table: AtomicTable) -> None:
    emulated = table.case.run(emulate)
    for name, rows in (
        ("old", table.rows),
        ("new", table.rows),
        ("contested", table.contested_rows),
    ):
        gpu_rows, emulated_rows = (x[f"{table.name}/{name}"] for x in (recorded(), emulated))
        for row, gpu, here in zip(rows, gpu_rows, emulated_rows, strict=True):
            gpu, here = gpu.view(table.compare), here.view(table.compare)
            wrong = differing(gpu, here)
            given: list[np.ndarray] = (
                [x.view(table.compare) for x in table.given] if name != "contested" else []
            )
            assert not wrong.any(), complaint(f"{name} of {row}", wrong, given, gpu, here)


@pytest.mark.parametrize("case", _OTHERS, ids=lambda case: case.name)
def test_warp_level(case: Case) -> None:
    for name, emulated in case.run(emulate).items():
        wrong = differing(recorded()[name], emulated)
        assert not wrong.any(), complaint(name, wrong, (), recorded()[name], emulated)


def _mma(case: str, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the accumulators: (products so far, problem, lane, element), float16 as such."""
    found = {"single": outputs[f"{case}/single"], "chained": outputs[f"{case}/chained"][None]}
    if f"{case}/half" in outputs:  # sums of bfloat16 are float32 only
        found["half"] = outputs[f"{case}/half"].view(np.float16)
    return found


@cache
def emulated_mma(case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the results, and the sums of the magnitudes of the terms of each."""
    both = (mma_case(case, magnitudes).run(emulate) for magnitudes in (False, True))
    results, magnitudes = (_mma(case, outputs) for outputs in both)
    return results, magnitudes


# Problems whose sums the accumulator holds: in any order the same.
_EXACT_MMA = {
    "single": ("a distinct", "b distinct", "a and b distinct"),
    "half": ("a distinct", "b distinct"),
}
_EXACT_MMA["chained"] = _EXACT_MMA["single"]


def mma_mismatches(case: str, gpu: dict[str, np.ndarray], problem: int) -> list[str]:
    """Return complaints about one problem: exact if its sums are, else within the bound.

    Tensor cores add exact products in an order, and with a rounding between, that nobody documents.
    The bounds are shares of the sum of the terms' magnitudes, for every 8 terms. Of 400 random
    problems of m16n8k8 on an H200 the worst lost 2^-21.9 with float32 accumulators and 2^-10.5 with
    float16.
    """
    results, magnitudes = emulated_mma(case)
    kind = MMA_PROBLEMS[problem]
    found = []
    for name, emulated in results.items():
        share_lost = 2.0**-21 if emulated.dtype == np.float32 else 2.0**-10
        for step in range(len(emulated)):
            ours, theirs = emulated[step, problem], gpu[name][step, problem]
            wrong = differing(theirs, ours)
            if kind not in _EXACT_MMA[name]:
                products = (step + 1 if name != "chained" else 2) * MMA_DEPTH[case] // 8
                scale = magnitudes[name][step, problem].astype(np.float64)
                with np.errstate(invalid="ignore"):
                    distance = np.abs(theirs.astype(np.float64) - ours.astype(np.float64))
                    close = distance <= share_lost * products * scale
                wrong &= ~(close & np.isfinite(ours) & np.isfinite(theirs))
            if wrong.any():
                found.append(complaint(f"{name}, product {step + 1}", wrong, (), theirs, ours))
    return found


@pytest.mark.parametrize("problem", range(len(MMA_PROBLEMS)), ids=lambda i: MMA_PROBLEMS[i])
@pytest.mark.parametrize("case", MMA_DEPTH)
def test_mma(case: str, problem: int) -> None:
    found = mma_mismatches(case, _mma(case, recorded()), problem)
    assert not found, "\n".join(found)


@pytest.mark.deep
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_error_in_any_instruction_is_noticed(table: Table) -> None:
    """One wrong result in each row: the lowest bit where exact, 1 % where approximate."""
    gpu = recorded()[f"{table.name}/results"]
    for row, instruction in enumerate(table.instructions):
        wrong = gpu.copy()
        values = table.results(gpu)[row].reshape(gpu.shape[1], -1)
        if is_exact(instruction.opcode):
            at = int(np.flatnonzero(~np.isnan(values).any(axis=1))[-1])
            wrong[row, at] ^= np.uint64(1)
        else:
            ordinary = (np.abs(values) > 0.01) & (np.abs(values) < 100)
            at = int(np.flatnonzero(ordinary.all(axis=1))[0])
            flipped = {2: 0x40, 4: 0x20000}[values.itemsize]  # about 2^-5 of the number
            if instruction.result == "bf16":  # of which `values` is float32
                flipped >>= 16
            wrong[row, at] ^= np.uint64(flipped)
        found = table_mismatches(table, wrong, emulated_table(table.name))
        assert instruction.name in found
