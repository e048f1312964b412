"""Small bugs: each kind is a pattern in a line of code, and what takes its place."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

Replacement = str | Callable[[re.Match[str]], str]


class Bug(NamedTuple):
    """One line of a file below cuda_src, counted from 1, as it is and as it is made."""

    file: str
    line: int
    kind: str
    right: str
    wrong: str

    def plant(self, text: str) -> str:
        """The file's text with the bug in it."""
        lines = text.splitlines(keepends=True)
        found = lines[self.line - 1]
        if found.rstrip("\n") != self.right:
            raise ValueError(f"{self.file}:{self.line} is not {self.right!r}: draw bugs anew")
        lines[self.line - 1] = found.replace(self.right, self.wrong)
        return "".join(lines)


def swapped(*pairs: tuple[str, str]) -> Callable[[re.Match[str]], str]:
    """Replace each of a pair by the other."""
    other = {**dict(pairs), **{b: a for a, b in pairs}}
    return lambda match: other[match[0]]


def word(*names: str) -> str:
    return rf"(?<![\w:])(?:{'|'.join(names)})(?!\w)"


NAME = r"[A-Za-z_][\w.]*(?:\[\w+\])?"
NUMBER = r"(?<![\w.])\d+(?![\w.])"
OPERAND = rf"(?:{NAME}(?:\([\w.]*\))?|\d+(?:\.\d*)?f?)(?![\w.(\[])"
STATEMENT = r"return|for|if|else|while|const\b|using|__sync"
VALUE = r"(?:(?<=[^=!<>]= )|(?<=return ))"
CONDITION = r"\((?:[^()]|\([^()]*\))*\)"

KINDS: dict[str, list[tuple[str, Replacement]]] = {
    "boundary": [
        (r"(?<= )(?:<=|>=|<|>)(?= )", swapped(("<", "<="), (">", ">="))),
        (NUMBER, lambda match: str(int(match[0]) + 1)),
        (NUMBER, lambda match: str(abs(int(match[0]) - 1))),
    ],
    "relation": [
        (r"(?<= )(?:==|!=)(?= )", swapped(("==", "!="))),
        (r"&&|\|\|", swapped(("&&", "||"))),
    ],
    "term": [
        (rf" [+-] {OPERAND}(?! [*/%])", ""),
        (r"(?<=[\w)\]]) (?:\+|-)(?= [\w(])", swapped((" +", " -"))),
        (r" [+-]= ", swapped((" += ", " -= "))),
    ],
    "factor": [
        (rf" \* {OPERAND}", ""),
        (rf" / {OPERAND}", ""),
        (r" [/%] ", swapped((" / ", " % "))),
        (r"\b[\w.\[\]]+ \*= [^;]+;", ";"),
    ],
    "barrier": [(r"(?:__syncthreads|__syncwarp|cta_barrier|bar_sync)\([^;]*\);", ";")],
    "guard": [
        (rf"\bif {CONDITION}(?= \S)", "if (true)"),
        (rf"\bif {CONDITION}(?= \S)", "if (false)"),
        (rf"{VALUE}[^=?:;,]+ \? ", "true ? "),
        (rf"{VALUE}[^=?:;,]+ \? ", "false ? "),
    ],
    "extreme": [
        (word("min", "max", "fminf", "fmaxf"), swapped(("min", "max"), ("fminf", "fmaxf"))),
        (r"-kInfinity\b", "0.f"),
        (r"(?<== )0\.f(?=[;}])", "1.f"),
    ],
    "member": [
        (
            r"(?<=[\w\])]\.)(?:x|y|begin|end|row|key|batch|head)(?![\w(])",
            swapped(("x", "y"), ("begin", "end"), ("row", "key"), ("batch", "head")),
        ),
    ],
    "arguments": [(rf"(?<=[(,] )?\b({NAME}), ({NAME})(?=[,)])", r"\2, \1")],
    "omission": [
        (rf"^(\s*)(?!{STATEMENT})[\w:.]+(?:<[\w:, ]+>)?\(.*\);", r"\1;"),
        (r"^(\s*)[\w.\[\]]+ [+|&^]?= [^;]+;", r"\1;"),
    ],
    "sign": [(r"(?<=[(,=] )-(?=[\w(])|(?<=\()-(?=[\w(])", "")],
    "flag": [(word("true", "false"), swapped(("true", "false")))],
}  # fmt: skip


def code_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Number, line and its code of all lines that may change.

    Not comments, preprocessor lines, static_asserts, heads of templates, nor assembly.
    """
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"//.*|/\*.*?\*/", lambda comment: " " * len(comment[0]), line).rstrip()
        stripped = code.strip()
        if continued or stripped.startswith(("#", "static_assert", "template")):
            directive = stripped.startswith("#") or stripped.endswith("\\")
            ends = not stripped.endswith("\\") if directive else stripped.endswith((";", ">", "{"))
            continued = not ends
        elif stripped and '"' not in code:
            yield number, line, code


def bugs_in(file: str, text: str) -> list[Bug]:
    """Every bug that a file could have, each line's each only once."""
    found: dict[tuple[int, str], Bug] = {}
    for number, line, code in code_lines(text):
        for kind, rules in KINDS.items():
            for pattern, replacement in rules:
                for match in re.finditer(pattern, code):
                    made = (
                        replacement(match) if callable(replacement) else match.expand(replacement)
                    )
                    wrong = code[: match.start()] + made + code[match.end() :] + line[len(code) :]
                    if wrong != line:
                        found.setdefault((number, wrong), Bug(file, number, kind, line, wrong))
    return list(found.values())


def draw(texts: dict[str, str], rng: random.Random) -> Iterator[Bug]:
    """Bugs without end or until there are none: of every file in turn, of a kind, at a place."""
    left = {file: bugs_in(file, text) for file, text in texts.items()}
    while left := {file: bugs for file, bugs in left.items() if bugs}:
        for file in rng.sample(sorted(left), len(left)):
            kind = rng.choice(sorted({bug.kind for bug in left[file]}))
            bug = rng.choice([bug for bug in left[file] if bug.kind == kind])
            left[file].remove(bug)
            yield bug
