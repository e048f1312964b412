"""Docstrings say what a thing is or does from their first word on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupyattn

PACKAGE = Path(cupyattn.__file__).parent
VAGUE = ("Of ", "The same", "What ")
"""Beginnings that leave out what the thing is: a reader needs a second reading."""

Body = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring with its line: of modules, classes, functions, constants and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Body):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str):
                        yield statement.lineno, text.lstrip()


def vague(source: str) -> list[str]:
    """The line and the first line of each docstring with a vague beginning."""
    return [
        f"{line}: {text.splitlines()[0]}"
        for line, text in sorted(docstrings(source))
        if text.startswith(VAGUE)
    ]


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module does."""',
        'class Call:\n    """Of a call."""',
        'class Call:\n    rows: int\n    """Of a call."""',
        'def _call():\n    """The same for a call."""',
        'async def call():\n    """\n    What is called.\n    """',
        'def call():\n    def within():\n        """What is called."""',
        'ROWS = 4\n"""Of a call."""',
    ],
)
def test_vague_beginning_is_found(source):
    assert len(vague(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of a call. What follows is fine."""',
        'def call():\n    """Return the same."""\n    return """What a text."""',
    ],
)
def test_other_strings_are_not_found(source):
    assert not vague(source)


def test_docstrings_begin_with_what_a_thing_is_or_does():
    """Begin with a noun phrase for a class or a constant, with an imperative for a function."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in vague(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)
