"""What `import cupyattn` loads, and what is loaded where it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.lazy_imports import LAZY

import cupyattn
from cupyattn import models

ROOT = Path(cupyattn.__file__).parent.parent


def test_import_is_light(tmp_path):
    """`import cupyattn` imports neither CuPy nor rich nor the emulator, and compiles nothing."""
    cache_folder = tmp_path / "kernels"
    script = "import sys, json, cupyattn; print(json.dumps(sorted(sys.modules)))"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUPYATTN_CACHE_DIR": str(cache_folder),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    modules = json.loads(result.stdout)
    assert "cupyattn" in modules
    assert not [name for name in modules if name.startswith("cupyattn.emulator")]
    loaded = {name.partition(".")[0] for name in modules}
    assert not loaded & LAZY
    assert not cache_folder.exists()


def test_the_emulator_is_there_when_asked_for():
    script = (
        "import cupyattn; assert 'emulator' in dir(cupyattn); "
        "print(cupyattn.emulator.Checks.fast().races, cupyattn.emulator.__name__); "
        "import cupyattn.emulator as module; assert module is cupyattn.emulator"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == "False cupyattn.emulator\n"


def test_training_is_there_when_asked_for():
    """Whoever generates imports no training."""
    script = (
        "import sys; from cupyattn import models; name = 'cupyattn.models.training'; "
        "assert 'training' in dir(models) and name in models.__doc__; "
        "assert not [each for each in sys.modules if each.startswith(name)]; "
        "print(models.training.Trainer.__name__, models.training.__name__); "
        "import cupyattn.models.training as module; assert module is models.training"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == "Trainer cupyattn.models.training\n"


@pytest.mark.parametrize("module", [cupyattn, models])
def test_other_names_are_not_there(module):
    told = f"module '{module.__name__}' has no attribute 'emulators'"
    with pytest.raises(AttributeError, match=told):
        module.emulators  # noqa: B018
