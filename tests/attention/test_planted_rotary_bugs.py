"""Bugs planted in the rotary embedding of attention's arrays are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support import backward_runs
from support.planted_bugs import Bug, planted_device
from support.rotary import RotaryProblem
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import reference
from cupyattn.emulator import KernelFault, OutOfBoundsError

pytestmark = pytest.mark.nvrtc

SHARED, DENSE, PACKED = "attention/rotary.cuh", "attention/rotary.cu", "attention/rotary_varlen.cu"
SLOTS = "layers/rotated_slots.cuh"
CHUNKS = "attention/tensor_core/rotated_chunks.cuh"
FORWARD = "attention/tensor_core/forward_rotary.cu"
OFFSETS = (("q_offset", (2, 40)), ("seqused_k", (50, 33)), ("rotary", (61, 4)))
PROBLEM = RotaryProblem(B=2, Sq=21, Sk=50, H=2, G=1, D=24, Dv=24, dtype="float16", drawn=OFFSETS)
VARLEN = VarlenProblem(PROBLEM, queries=(20, 13), keys=(41, 50), spare=2)
CHUNKS_VARLEN = VarlenProblem(
    replace(PROBLEM, Sq=140, drawn=(*OFFSETS[:2], ("rotary", (180, 8)))),
    queries=(20, 135), keys=(41, 50),
)  # fmt: skip
PACKED_PROBLEMS = {"varlen": VARLEN, "chunks, varlen": CHUNKS_VARLEN}
FORWARD_PACKED = "attention/tensor_core/forward_rotary_varlen.cu"
KINDS = {
    "halves": PROBLEM,
    "neighbours": replace(PROBLEM, interleaved=True),
    "outside": replace(PROBLEM, drawn=(("q_offset", (2, 41)), OFFSETS[2])),
    # These turn in the forward kernel, in more than one tile.
    "chunks": replace(PROBLEM, Sq=140, drawn=(*OFFSETS[:2], ("rotary", (180, 8)))),
    "chunks of neighbours": replace(
        PROBLEM, Sq=140, drawn=(*OFFSETS[:2], ("rotary", (180, 8))), interleaved=True
    ),
    "chunks outside": replace(PROBLEM, drawn=(("q_offset", (2, 41)), ("rotary", (61, 8)))),
}


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its largest error over the bound."""

    def run(name: str, *bugs: Bug) -> float:
        folder, modules = tmp_path / "cuda_src", ("forward", "backward", "varlen")
        planted_device(monkeypatch, folder, *bugs, modules=modules)
        if name in PACKED_PROBLEMS:
            packed = PACKED_PROBLEMS[name]
            arrays = *packed.arrays(), *packed.longest
            return packed.ratio(
                *cupyattn.attention_varlen(*arrays, return_lse=True, **packed.options())
            )
        kind, _, direction = name.partition(", ")
        problem = KINDS[kind]
        if direction == "backward":
            arrays, options = backward_runs.inputs(problem)
            grads = cupyattn.attention_backward(*arrays, **options)
            found = {n: x for n, x in grads._asdict().items() if x is not None}
            return max(backward_runs.error_ratios(found, arrays, options).values())
        arrays, options = problem.arrays(), problem.options()
        found = cupyattn.attention(*arrays, **options, return_lse=True)
        exact = reference.attention(*arrays, **options)
        bounds = reference.attention_bound(*arrays, dtype="float16", tile_k=16, **options)
        return max(map(reference.error_ratio, found, exact, bounds))

    return run


@pytest.mark.parametrize(
    "name",
    [
        *("halves", "neighbours", "halves, backward", "neighbours, backward", "varlen"),
        *("chunks", "chunks of neighbours", "chunks, varlen"),
    ],
)
def test_a_clean_copy_is_right(name, ratio_with):
    assert 0 < ratio_with(name) <= 1


POSITIONS = "(keys ? 0 : query_offset(attention, q_offsets_g, token.batch))"
WRONG = [
    ("halves", Bug(DENSE, POSITIONS, "0")),
    ("halves", Bug(DENSE, POSITIONS, POSITIONS.replace("keys ? 0 : ", ""))),
    ("halves, backward", Bug(SLOTS, "turn = params.sign * sin[i]", "turn = sin[i]")),
    ("varlen", Bug(PACKED, "within + (keys ? 0 : sequence.q_offset)", "within")),
]
WRONG += [
    ("chunks", Bug(CHUNKS, "second ? column - half : column + half", "column + half % 8")),
    ("chunks", Bug(FORWARD, "q_offset + place.first_row", "q_offset")),
    ("chunks, varlen", Bug(FORWARD_PACKED, "sequence.q_offset + place.first_row", "place.begin")),
    ("chunks", Bug(CHUNKS, "first_position + item,", "first_position,")),
    ("chunks", Bug(CHUNKS, "second ? partner : column)", "column)")),
    ("chunks", Bug(CHUNKS, "if (column >= 2 * half)", "if (column >= half)")),
    ("chunks", Bug(CHUNKS, "is_second ? sin[angle] : -sin[angle]", "sin[angle]")),
    ("chunks of neighbours", Bug(CHUNKS, "x.item[i ^ 1]", "x.item[i]")),
    ("chunks of neighbours", Bug(CHUNKS, "INTERLEAVED ? i / 2 : i;", "INTERLEAVED ? i / 4 : i;")),
    ("halves", Bug(DENSE, "token.row = number - token.batch * length", "token.row = number")),
    ("halves", Bug(SHARED, "keys ? strides[1].seq", "false ? strides[1].seq")),
    ("halves", Bug(SHARED, "keys ? params.heads[1]", "false ? params.heads[1]")),
    ("halves", Bug(SHARED, "thread - params.query_threads", "thread")),
    ("neighbours", Bug(SLOTS, "slot * (2 * kPairs)", "slot * kPairs")),
    ("halves", Bug(SLOTS, "= column[p] < params.dim", "= column[p] + 8 < params.dim")),
    ("varlen", Bug(PACKED, "keys ? packed_keys", "false ? packed_keys")),
    ("varlen", Bug(PACKED, "(keys ? sequence.keys : sequence.queries).begin", "0")),
]


@pytest.mark.parametrize(("name", "bug"), WRONG, ids=str)
def test_wrong_rotations_are_found(name, bug, ratio_with):
    with suppress(KernelFault):  # then the emulator has found it
        assert ratio_with(name, bug) > 1


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("halves", Bug(SHARED, "number >= (keys ? params.tokens[1] : params.tokens[0]) ||", "")),
        ("chunks outside", Bug(CHUNKS, "position < tables.length", "position <= tables.length")),
        (
            "outside",
            Bug(SLOTS, "position < params.table_length", "position <= params.table_length"),
        ),
    ],
    ids=str,
)
def test_what_lies_outside_is_not_read(name, bug, ratio_with, monkeypatch):
    monkeypatch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
    with pytest.raises(OutOfBoundsError):
        ratio_with(name, bug)
