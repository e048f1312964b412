"""The examples in README and in the recipes of the API reference."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"

WEIGHTS = 'models.load("smollm2")'


def examples(*, with_weights: bool = False) -> list[str]:
    """Return README's examples in Python: those that need a package of weights, or all others."""
    text = README.read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [example for example in found if (WEIGHTS in example) == with_weights]


def recipes() -> list[str]:
    """Return the code of the page of recipes."""
    text = (ROOT / ".github/reference/recipes.rst").read_text(encoding="utf-8")
    blocks = re.findall(r"^\.\. code-block:: python\n((?:   .*\n|\n)+)", text, flags=re.MULTILINE)
    return [textwrap.dedent(block).strip() + "\n" for block in blocks]
