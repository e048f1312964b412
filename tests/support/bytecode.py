"""Where no bytecode may be written next to the sources, keep it with the compiled kernels.

Without it each worker of pytest-xdist rewrites the asserts of every test file, which is half of the
collection, and a hundred other processes compile all that they import. Import this module before
hypothesis, whose asserts pytest rewrites too.
"""

from __future__ import annotations

import os
import sys

from cupyattn.runtime.folders import cache_directory

if sys.dont_write_bytecode and (_folder := cache_directory()) is not None:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(_folder / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
