"""The library's own kernels, to be analysed: rows of its tables by name."""

from __future__ import annotations

from difflib import get_close_matches

from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.spec import Specialisation


def row(entry: str, /, **macros: int | str) -> Specialisation:
    """Return a kernel of the library as it is compiled for Turing: what `analyse` takes.

    Parameters
    ----------
    entry : str
        The name of the kernel, one of ``cupyattn.device_info()["kernels"]``.
    **macros : int or str
        Values that its macros have to have, such as ``DTYPE="float16", HEAD_DIM=64``.

    Returns
    -------
    Specialisation
        The first row of its table with these values. All of its macros are in ``defines``, a CTA's
        threads in ``threads``, its dynamic shared memory in ``shared_bytes``.

    Raises
    ------
    ValueError
        If there is no such kernel, or no such row.

    Examples
    --------
    >>> from cupyattn import turing
    >>> turing.row("attention_forward", HEAD_DIM=64).threads
    128
    """
    if entry not in KERNELS:
        near = get_close_matches(str(entry), KERNELS)
        raise error(
            ValueError,
            f"there is no kernel {shown(entry)}",
            f"near it are {', '.join(near)}" if near else "python -m cupyattn info lists them",
            "pass one of their names",
        )
    rows = [each for each in catalogue() if each.spec.entry == entry]
    for each in rows:
        if macros.items() <= dict(each.macros).items():
            return each
    values = {
        name: sorted({dict(each.macros).get(name) for each in rows}, key=str) for name in macros
    }
    raise error(
        ValueError,
        f"{entry} has no row with {macros}",
        f"its rows have {values}",
        "pass values that one row has together",
    )
