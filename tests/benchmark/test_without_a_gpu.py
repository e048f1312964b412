"""What commands that time kernels say where there is no GPU."""

from __future__ import annotations

import pytest

from cupyattn import __main__ as command_line
from cupyattn.benchmark import __main__ as benchmarks
from cupyattn.functional.device_info import device_count

pytestmark = pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (benchmarks.main, "finetune"),
        *((command_line.main, name) for name in ("report", "tune")),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_it_is_said_at_once(main, name, capsys):
    assert main([name]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{name}: there is no CUDA device")
