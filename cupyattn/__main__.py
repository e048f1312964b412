"""``python -m cupyattn``: see `cupyattn.cli`; what times kernels is `cupyattn.benchmark`'s."""

import sys
from collections.abc import Sequence

try:  # they take most of a second
    from cupyattn import cli
    from cupyattn.benchmark import report, tune
    from cupyattn.runtime.kernel_cache import end_process
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)  # cli.INTERRUPTED, which may not be there yet


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return cli.main(argv, (tune, report))


if __name__ == "__main__":
    code = main()
    if code == cli.INTERRUPTED:
        end_process(code)  # NVRTC cannot be stopped: a usual exit would wait for its threads
    sys.exit(code)
