"""Commands print for one width, whatever terminal the tests run in."""

from __future__ import annotations

import pytest

from cupyattn.cli import compile, configurations


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def uncompiled(monkeypatch):
    """The command with a compiler that only records its arguments."""

    def pretend(row, arch):
        sizes = {"registers": 32, "spill_store_bytes": 0, "spill_load_bytes": 0, "ctas_per_sm": 4}
        sizes |= {"threads": row.threads, "shared_bytes": row.shared_bytes}
        told = {"cached": True, "seconds": 0.0, "macros": dict(row.macros)}
        return {"kernel": row.spec.entry, "row": configurations.row_name(row), **sizes, **told}

    monkeypatch.setattr(compile, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(compile, "compiled_kernel", pretend)
