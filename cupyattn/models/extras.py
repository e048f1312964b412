"""The packages of the extra `models`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cupyattn.runtime.errors import error
from cupyattn.runtime.fork import no_fork


def extra(module: str, does: str) -> Any:
    """Import a module of the extra; `does` says what it is for.

    Raises
    ------
    RuntimeError
        If it is not installed.
    """
    try:
        with no_fork():
            return import_module(module)
    except ImportError as failure:
        raise error(
            RuntimeError,
            f"no {module.partition('.')[0]}, which {does} ({failure})",
            "it comes with the extra models",
            "pip install 'cupyattn[models]'",
        ) from failure
