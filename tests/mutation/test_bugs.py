"""Drawn bugs change one line of code, in every file, reproducibly."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from cupyattn.runtime.source import source_root
from mutation.bugs import KINDS, Bug, bugs_in, draw

EXAMPLES = {
    "boundary": ("if (row < rows) {", "if (row <= rows) {"),
    "relation": ("return a == b;", "return a != b;"),
    "term": ("x = row + first;", "x = row - first;"),
    "factor": ("at = row * stride + column;", "at = row + column;"),
    "barrier": ("  __syncthreads();  // all have read", "  ;  // all have read"),
    "guard": ("if (valid(row)) store(x);", "if (true) store(x);"),
    "extreme": ("m = fmaxf(m, s);", "m = fminf(m, s);"),
    "member": ("at = warp.row;", "at = warp.key;"),
    "arguments": ("x = f(batch, head);", "x = f(head, batch);"),
    "omission": ("  total += p;", "  ;"),
    "sign": ("x = exp2(-m);", "x = exp2(m);"),
    "flag": ("return false;", "return true;"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_its_bug(kind: str):
    right, wrong = EXAMPLES[kind]
    assert (right, wrong) in {(bug.right, bug.wrong) for bug in bugs_in("a.cu", right)}
    assert kind in {bug.kind for bug in bugs_in("a.cu", right)}


@pytest.mark.parametrize(
    "text",
    [
        "// if (a < b) return;",
        "#define LAST (N - 1)",
        "#define TWO_LINES \\\n  (N - 1)",
        "static_assert(A < B,\n  C < D);",
        "template <int kRows, bool kFull = true>",
        'asm volatile("bar.sync 0, 64;");',
    ],
)
def test_what_is_no_code_stays(text: str):
    assert bugs_in("a.cu", text) == []


def test_what_stands_behind_a_comment_is_kept():
    (bug,) = [bug for bug in bugs_in("a.cu", "f(x, /*whole=*/true, y);") if bug.kind == "flag"]
    assert bug.wrong.split() == ["f(x,", "false,", "y);"]


def test_a_bug_is_planted_in_its_line_and_nowhere_else():
    text = "int a = 1;\nint b = 1;\n"
    (bug, *_) = [bug for bug in bugs_in("a.cu", text) if bug.line == 2]
    assert bug.plant(text) == f"int a = 1;\n{bug.wrong}\n"
    with pytest.raises(ValueError, match="draw bugs anew"):
        bug.plant("int c;\nint d;\n")


def test_the_kernels_have_bugs_of_every_kind_and_a_seed_draws_the_same_ones():
    root = source_root()
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.cu*"))
    }
    first, second = (list(islice(draw(texts, random.Random(7)), 400)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 400
    assert {bug.kind for bug in first} == set(KINDS)
    assert {bug.file for bug in first[: len(texts)]} <= set(texts)
    for bug in first:
        assert isinstance(bug, Bug)
        assert bug.plant(texts[bug.file]) != texts[bug.file]
