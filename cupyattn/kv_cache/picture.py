"""A picture of a pool: which blocks are free, cached, and whose, and how far each is filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork

BACKGROUNDS = {"free": "white", "cached": "0.85", "used": "0.4"}
"""The backgrounds of blocks that belong to none of the sequences drawn, by the block's state."""
EDGE = "0.6"
MARGIN = 0.06  # of a cell
FAINT = 0.25  # the colour of what is not filled


def draw(
    allocator: BlockAllocator,
    sequences: Mapping[str, Sequence] | Iterable[Sequence] | None,
    axes: Any,
    columns: int,
) -> Any:
    """Draw the pool into axes, which are made if they are None; see `PagedKVCache.picture`."""
    try:
        with no_fork():
            from matplotlib.patches import Rectangle
    except ImportError:
        raise error(
            RuntimeError,
            "no matplotlib, which draws the picture",
            "it is no dependency of the library, and comes with the extra notebooks",
            "pip install matplotlib",
        ) from None
    named = _named(allocator, sequences)
    if axes is not None and not hasattr(axes, "add_patch"):
        raise error(
            TypeError, f"got axes = {shown(axes)}", "it is an Axes of matplotlib, or None",
            "pass what matplotlib.pyplot.subplots returned second",
        )  # fmt: skip
    size, count = allocator.block_size, allocator.num_blocks
    rows = -(-count // columns)
    if axes is None:
        with no_fork():
            import matplotlib.pyplot as plt

        _, axes = plt.subplots(figsize=(0.45 * columns + 2, 0.45 * rows + 0.6))
    owners: dict[int, list[tuple[Any, float]]] = {}  # of each block: a colour, the filled share
    for number, (name, sequence) in enumerate(named.items()):
        colour = f"C{number % 10}"
        note = _note(allocator, sequence)
        axes.add_patch(Rectangle((0, 0), 0, 0, color=colour, label=f"{name}: {note}"))
        if sequence in allocator and not sequence.is_swapped:
            for place, block in enumerate(sequence.block_ids):
                filled = min(1.0, (len(sequence) - place * size) / size)
                if block >= 0:
                    owners.setdefault(block, []).append((colour, filled))
    for block in range(count):
        x, y = block % columns + MARGIN, block // columns + MARGIN
        side = 1 - 2 * MARGIN
        of_block = owners.get(block, [])
        background = "none" if of_block else BACKGROUNDS[allocator.state(block)]
        for part, (colour, filled) in enumerate(of_block):
            # Sharers lie above each other; what is filled is in full colour, from the left.
            height = side / len(of_block)
            top = y + part * height
            axes.add_patch(Rectangle((x, top), side, height, color=colour, alpha=FAINT, lw=0))
            axes.add_patch(Rectangle((x, top), side * filled, height, color=colour, lw=0))
        axes.add_patch(Rectangle((x, y), side, side, facecolor=background, edgecolor=EDGE))
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_frame_on(False)
    if named:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    return axes


def _no_sequences(name: str, passed: Any) -> TypeError:
    return error(
        TypeError,
        f"got {name}, {shown(passed)}",
        "a picture is of Sequences: a mapping of names to them, a list, or None for all",
        "pass what this cache's allocator.add returned, [sequence] for one",
    )


def _named(
    allocator: BlockAllocator, sequences: Mapping[str, Sequence] | Iterable[Sequence] | None
) -> dict[str, Sequence]:
    if sequences is None:
        sequences = allocator.sequences
    if isinstance(sequences, Sequence) or not isinstance(sequences, Iterable):
        raise _no_sequences("sequences", sequences)
    if not isinstance(sequences, Mapping):
        sequences = {f"sequence {number}": each for number, each in enumerate(sequences)}
    for name, sequence in sequences.items():
        if not isinstance(sequence, Sequence):
            raise _no_sequences(name, sequence)
        if not sequence.is_freed and sequence not in allocator:
            raise error(
                ValueError,
                f"got {name}, {sequence!r} of another allocator",
                "a picture shows the sequences of its own pool",
                "pass sequences that this cache's allocator made",
            )
    return dict(sequences)


def _note(allocator: BlockAllocator, sequence: Sequence) -> str:
    if sequence.is_freed:
        return "finished"
    swapped = ", swapped out" if sequence.is_swapped else ""
    return f"{len(sequence)} tokens{swapped}"
