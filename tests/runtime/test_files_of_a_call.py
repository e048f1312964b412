"""A call passes through few of the package's files."""

from __future__ import annotations

import pytest
from support.files_of_a_call import in_new_process

MOST_FILES = {"rms_norm": (12, 7), "gelu": (11, 7)}
"""Files that a function's first and second call execute at most."""


@pytest.mark.nvrtc
@pytest.mark.parametrize("function", MOST_FILES)
def test_call_executes_few_files(function):
    for executed, most in zip(in_new_process(function), MOST_FILES[function], strict=True):
        assert "runtime/plan.py" in executed.functions
        assert len(executed.functions) <= most, str(executed)
