"""Cards without tensor cores: what is run on them, and which kernels meet mma."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from support.devices import KERNELS

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.device.tensor_cores import TensorCores
from cupyattn.runtime.source import include_closure, source_root
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.target import TENSOR_CORES_VARIABLE

_MMA = re.compile(r"^\s*mma\.", re.MULTILINE)


@contextmanager
def without_tensor_cores() -> Iterator[None]:
    """Inside, the public functions run the kernels of a card without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TENSOR_CORES_VARIABLE, "0")
        if device_count():
            patch.setattr(KERNELS.device, "_tensor_cores", TensorCores(False, "a test"))
        with KERNELS.running():
            yield


@cache
def has_mma(specialisation: Specialisation) -> bool:
    """Whether its PTX has the instruction; what does not include mma.cuh is not compiled."""
    source = source_root() / specialisation.spec.source
    if all(path.name != "mma.cuh" for path in include_closure(source)):
        return False
    return bool(_MMA.search(compile_ptx(specialisation, TURING).code.decode()))
