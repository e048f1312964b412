"""Packages of the extras, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cupyattn.runtime.errors import error
from cupyattn.runtime.fork import no_fork


def extra(module: str, does: str, name: str = "models") -> Any:
    """Import a module of a package that the extra `name` installs; `does` is what it is for."""
    try:
        with no_fork():
            return import_module(module)
    except ImportError as failure:
        raise error(
            RuntimeError,
            f"no {module.partition('.')[0]}, which {does} ({failure})",
            f"the extra {name} installs it",
            f"pip install 'cupyattn[{name}]'",
        ) from failure
