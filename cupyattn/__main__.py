"""``python -m cupyattn``, and the command ``cupyattn``: see `cupyattn.cli`.

``cupyattn benchmark ...`` is ``python -m cupyattn.benchmark ...``.
"""

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
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["benchmark"]:
        from cupyattn.benchmark import __main__ as benchmark

        return benchmark.main(argv[1:])
    return cli.main(argv, (tune, report))


def console() -> None:
    """Run a command and end the process with its exit code."""
    code = main()
    if code == cli.INTERRUPTED:
        end_process(code)  # NVRTC cannot be stopped: a usual exit would wait for its threads
    sys.exit(code)


if __name__ == "__main__":
    console()
