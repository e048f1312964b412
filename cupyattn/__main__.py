"""``python -m cupyattn``: see `cupyattn.cli`."""

import sys

from cupyattn.cli import INTERRUPTED, main
from cupyattn.kernels.cache import end_process

if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        end_process(code)  # NVRTC cannot be stopped: a usual exit would wait for its threads
    sys.exit(code)
