"""Failures of the package tokenizers, whose panics pass every ``except Exception``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of the Rust code within the block as a ValueError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as failure:  # pyo3 cannot be imported for its PanicException
        if type(failure).__name__ != "PanicException":
            raise
        raise ValueError(str(failure)) from None
