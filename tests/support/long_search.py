"""``python -m support.long_search``: random operations of the allocator against its model.

From the checkout: ``PYTHONPATH=.:tests python -m support.long_search --operations 10000000``. Pools
of many shapes alternate; the blocks of an operation are read after it, and all at times.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import NamedTuple

from support.block_model import BlockModel, random_step

from cupyattn import BlockAllocator

ROUND = 500  # operations of one allocator, which is then emptied
LOOK = 50  # operations from one look at everything to the next


class Counts(NamedTuple):
    """Counts of events, which show whether a search came far."""

    operations: int
    refused: int
    found_tokens: int
    rounds: int


def search(operations: int, seed: int, look: int = LOOK) -> Counts:
    """Run as many operations; an AssertionError or RuntimeError is a bug."""
    rng = random.Random(seed)
    done = refused = found = rounds = 0
    while done < operations:
        blocks = rng.choice((1, 3, 8, 20, 60))
        allocator = BlockAllocator(
            blocks,
            rng.choice((1, 2, 3, 4, 7, 16)),
            prefix_caching=rng.random() < 0.8,
            watermark=min(rng.choice((0, 0, 1)), blocks - 1),
            num_host_blocks=rng.choice((0, 5, 40)),
        )
        longest = max(2, allocator.num_blocks * allocator.block_size // rng.choice((2, 4, 8)))
        system = [
            [rng.randrange(2) for _ in range(rng.randrange(longest // 2 + 1))] for _ in range(3)
        ]
        model = BlockModel(allocator)
        for number in range(min(ROUND, operations - done)):
            random_step(model, rng, longest, system)
            done += 1
            if number % look == 0:
                model.require_sound()
        model.require_empty()
        refused += model.refused
        found += model.found_tokens
        rounds += 1
    return Counts(done, refused, found, rounds)


def main() -> int:
    """Search, and print what happened."""
    parser = argparse.ArgumentParser(prog="python -m support.long_search", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.perf_counter()
    counts = search(arguments.operations, arguments.seed)
    print(
        f"seed {arguments.seed}: {counts.operations:,} operations on {counts.rounds:,} allocators, "
        f"{counts.refused:,} refused for want of blocks, {counts.found_tokens:,} tokens found in "
        f"the cache, nothing wrong, {time.perf_counter() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
