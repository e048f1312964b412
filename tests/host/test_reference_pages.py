"""The pages of the API reference name every public name once; CI builds them without a warning."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parent.parent.parent / ".github" / "reference"
MODULES = (
    "cupyattn",
    "cupyattn.models",
    "cupyattn.models.training",
    "cupyattn.distributed",
    "cupyattn.emulator",
    "cupyattn.turing",
    "cupyattn.kv_cache",
)
WHERE = re.compile(r"^\.\. currentmodule:: (\S+)$", flags=re.MULTILINE)
NAMED = re.compile(r"^(?:   |\.\. data:: )([A-Za-z]\w*)$", flags=re.MULTILINE)


def names_on(page: str) -> list[str]:
    """The public names in a page's tables."""
    _, *parts = WHERE.split(page)
    return [
        f"{module}.{name}"
        for module, text in zip(parts[::2], parts[1::2], strict=True)
        for name in NAMED.findall(text)
    ]


def test_names_are_found_in_tables_and_as_data():
    page = (
        ".. toctree::\n\n   other\n\n.. currentmodule:: a.b\n\n.. autosummary::\n   :toctree: x\n"
    )
    assert names_on(f"{page}\n   one\n\n.. data:: TWO\n\n   Some words.\n") == [
        "a.b.one",
        "a.b.TWO",
    ]


def test_every_public_name_has_one_page():
    if not PAGES.exists():
        pytest.skip("this is not a checkout: .github/reference is not here")
    found = Counter(
        name for path in PAGES.glob("*.rst") for name in names_on(path.read_text("utf-8"))
    )
    objects = {}  # the first name of each: what two modules have is documented in the first
    for module in map(import_module, MODULES):
        for name in module.__all__:
            objects.setdefault(id(getattr(module, name)), f"{module.__name__}.{name}")
    objects.pop(id(import_module("cupyattn").__version__))
    assert found == Counter(objects.values())
