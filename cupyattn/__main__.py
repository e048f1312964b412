"""``python -m cupyattn``: see `cupyattn.cli`."""

import sys

from cupyattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
