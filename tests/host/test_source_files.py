"""What CONTRIBUTING says of a source file: it fits on a few screens."""

from __future__ import annotations

from pathlib import Path

import cupyattn
from cupyattn.kernels.source import source_root

PACKAGE = Path(cupyattn.__file__).parent
TESTS = Path(__file__).resolve().parent.parent
MOST_LINES = 600


def test_files_fit_on_a_few_screens():
    """What is longer has a seam somewhere: cut it there."""
    folders = (PACKAGE, source_root(), TESTS)
    sources = [
        path for folder in folders for kind in ("*.py", "*.cu*") for path in folder.rglob(kind)
    ]
    assert len(sources) > 900
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    too_long = {str(path): count for path, count in lines.items() if count > MOST_LINES}
    assert not too_long
