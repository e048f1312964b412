"""Record the golden vectors of the emulator on a GPU.

``PYTHONPATH=.:tests python -m support.golden.capture`` does it.

The kernels are compiled to compute_75 PTX, whatever the GPU (what PTX has from compute_80 on: to
that); its driver compiles that for the device. So an H200 shows what PTX means there, not what the
machine code of a Turing GPU does. The metadata say which GPU it was. All cases are captured in one
run, on compute capability 8.0 or newer. The vectors are written to ``recorded.npz`` next to this
file unless ``--out`` says otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.golden import vectors
from support.golden.catalogue import CASES

from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.compile import compile_ptx, nvrtc_version
from cupyattn.runtime.spec import Specialisation


def execute(
    specialisation: Specialisation, arch: Arch, ctas: int, arguments: Sequence[Any]
) -> None:
    """Run a kernel on the current CUDA device and copy its arrays back."""
    import cupy

    module = cupy.cuda.function.Module()
    module.load(compile_ptx(specialisation, arch).code)
    kernel = module.get_function(specialisation.spec.entry)
    passed = [
        np.uintp(0)
        if value is None
        else cupy.asarray(value)
        if isinstance(value, np.ndarray)
        else value
        for value in arguments
    ]
    kernel((ctas, 1, 1), (specialisation.threads, 1, 1), passed)
    for value, given in zip(arguments, passed, strict=True):
        if isinstance(value, np.ndarray):
            value[...] = cupy.asnumpy(given)


def _driver_version() -> str:
    """Return the version that nvidia-smi tells, of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]


def describe_device() -> dict[str, Any]:
    """Return what the vectors depend on besides the kernels."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": _driver_version(),
        "cuda_of_driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "ptx_target": TURING.virtual,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Run every case, twice: a case whose results are not always the same is no golden one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=vectors.FILE)
    path = parser.parse_args().out
    outputs: dict[str, np.ndarray] = {}
    for case in CASES:
        results, again = case.run(execute), case.run(execute)
        for name, array in results.items():
            if array.tobytes() != again[name].tobytes():
                raise RuntimeError(f"{name} differs from run to run: it depends on an order")
        outputs |= results
    digests = {case.name: case.digest for case in CASES}
    others = {case.name: case.arch.virtual for case in CASES if case.arch != TURING}
    metadata = {**describe_device(), "other_ptx_targets": others, "digests": digests}
    vectors.save(path, outputs, metadata)
    print(json.dumps(metadata, indent=1))
    print(f"{path}: {path.stat().st_size} bytes, {len(outputs)} arrays")


if __name__ == "__main__":
    main()
