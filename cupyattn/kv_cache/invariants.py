"""Invariants of pools, their sequences and the prefix index."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cupyattn.kv_cache.pool import FREED, HELD, HERE, SWAPPED, Pool, Pools
from cupyattn.runtime.errors import error

if TYPE_CHECKING:
    from cupyattn.kv_cache.sequence import Sequence


def require_sound(pools: Pools) -> None:
    """Raise RuntimeError for the first thing that is broken."""
    sequences: list[Sequence] = pools.living()
    _require(all(sequence._state is not FREED for sequence in sequences), "a freed one lives on")
    for pool, state in ((pools.device, HERE), (pools.host, SWAPPED)):
        inside = [sequence for sequence in sequences if sequence._state is state]
        _states(pool)
        _owners(pool, inside)
    for sequence in sequences:
        _lengths(sequence, pools.block_size)
    if pools.device.index is not None:
        _index(pools, sequences)


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise error(
            RuntimeError,
            broken,
            "the allocator keeps this right whatever is called",
            "free every sequence before dropping it; otherwise this is a bug to report",
        )


def _states(pool: Pool) -> None:
    """Free + used + cached = pool, and no block in two of them."""
    free, cached = set(pool.free), set(pool.cached)
    _require(len(free) == len(pool.free), f"a {pool.name} block is free twice")
    _require(not free & cached, f"a {pool.name} block is both free and cached")
    unused = {block for block, count in enumerate(pool.refs) if not count}
    _require(unused == free | cached, f"unused {pool.name} blocks are neither free nor cached")
    nodes = pool.index.nodes if pool.index is not None else [None] * len(pool.refs)
    _require(
        all(nodes[block] is not None for block in cached), "a cached block is not in the index"
    )
    _require(all(nodes[block] is None for block in free), "a free block is in the index")


def _owners(pool: Pool, sequences: list[Sequence]) -> None:
    """Each block's count is the number of its owners."""
    owners = Counter(block for sequence in sequences for block in sequence._ids if block >= 0)
    for block, count in enumerate(pool.refs):
        expected = 0 if count == HELD else count
        _require(
            owners[block] == expected,
            f"{pool.name} block {block} has a count of {count} and {owners[block]} owners",
        )


def _lengths(sequence: Sequence, size: int) -> None:
    present = [block for block in sequence._ids if block >= 0]
    _require(len(set(present)) == len(present), f"{sequence} has a block twice")
    _require(len(sequence._ids) == -(-sequence._length // size), f"{sequence} has a wrong length")


def _index(pools: Pools, sequences: list[Sequence]) -> None:
    """Require that the index finds what blocks hold, and keeps no node that nothing needs."""
    index, size = pools.device.index, pools.block_size
    assert index is not None
    prefixes = [sequence._prefix for sequence in sequences if sequence._prefix is not None]
    _require(len(prefixes) == len(sequences), "a sequence has no place in the index")
    holders = Counter(id(prefix.node) for prefix in prefixes)
    _require(index.root.holders == holders[id(index.root)], "the root counts its holders wrongly")
    found = {}
    for node in index.walk():
        parent = node.parent
        _require(
            parent is not None and parent.children.get(node.tokens) is node,
            "a node of the index is not its parent's child",
        )
        _require(len(node.tokens) == size, "a node of the index is no whole block")
        _require(node.holders == holders[id(node)], "a node counts its holders wrongly")
        _require(
            bool(node.children or node.holders or node.block >= 0), "a node without use was kept"
        )
        if node.block >= 0:
            _require(node.block not in found, f"block {node.block} is found in two places")
            found[node.block] = node
    for block, place in enumerate(index.nodes):
        _require(found.get(block) is place, f"block {block} and its node disagree")
    for sequence, prefix in zip(sequences, prefixes, strict=True):
        depth, over = divmod(sequence._length, size)
        _require(prefix.depth == depth, f"{sequence} has a wrong place in the index")
        _require(len(prefix.tail) == over, f"{sequence} lost its last tokens")
        nodes = [prefix.node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        _require(nodes.pop() is index.root, f"{sequence} stands outside of the index")
        _require(len(nodes) == depth, f"{sequence} has too short or too long a prefix")
        if sequence._state is HERE:
            for block, own in zip(sequence._ids, [*reversed(nodes), None], strict=False):
                _require(
                    block < 0 or index.nodes[block] in (None, own),
                    f"block {block} is found by other tokens than it holds",
                )
