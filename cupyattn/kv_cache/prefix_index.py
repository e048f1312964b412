"""An index of full blocks by their tokens and prefix: a tree whose edges are blocks of tokens.

A node is a prefix of whole blocks. Its children are found by their tokens in a dict: Python
hashes the tokens and, where the hash agrees, compares them. So the place in the tree is the chained
hash of other libraries, equal blocks after different prefixes are different nodes, and no collision
can share a wrong block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class Node:
    """A prefix of whole blocks: its parent's prefix followed by its own block's tokens.

    `block` is the block id that may be shared for those tokens, -1 if there is none. A node lives
    while it has a block, children, or holders: the sequences whose last full block it is.
    """

    __slots__ = ("block", "children", "holders", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[tuple[int, ...], Node] = {}
        self.block = -1
        self.holders = 0


class PrefixIndex:
    """The tree, and each block's node in it."""

    __slots__ = ("block_size", "nodes", "root")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(None, ())
        self.nodes: list[Node | None] = [None] * num_blocks

    def match(self, tokens: list[int]) -> list[Node]:
        """Return the nodes of the longest prefix of `tokens` whose every block is there.

        At least one token is left over, because only computed tokens have logits.
        """
        node, found, size = self.root, [], self.block_size
        for start in range(0, len(tokens) - size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or child.block < 0:
                break
            found.append(child)
            node = child
        return found

    def extend(self, node: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Go from a node to the next for a block just filled; the first such block is shared."""
        child = node.children.get(tokens)
        if child is None:
            child = node.children[tokens] = Node(node, tokens)
        if child.block < 0:
            child.block = block
            self.nodes[block] = child
        return child

    def forget(self, block: int) -> None:
        """Stop sharing a block: from now on its content may change."""
        node = self.nodes[block]
        if node is not None:
            self.nodes[block] = None
            node.block = -1
            self.prune(node)

    def move(self, old: Node, new: Node) -> None:
        """Let a holder go from a node to another."""
        new.holders += 1
        old.holders -= 1
        self.prune(old)

    def prune(self, node: Node) -> None:
        """Remove a node that nothing needs, and the parents that only it needed."""
        parent = node.parent
        while parent and not node.children and not node.holders and node.block < 0:
            del parent.children[node.tokens]
            node, parent = parent, parent.parent

    def rebuild(self, held: Iterable[Node], blocks: dict[int, Node]) -> None:
        """Rebuild the tree from held nodes, nodes with blocks, and their parents."""
        held = list(held)
        kept: dict[int, Node] = {}
        for node in (*held, *blocks.values()):
            while node.parent is not None and id(node) not in kept:
                kept[id(node)] = node
                node = node.parent
        for node in (self.root, *kept.values()):
            node.children, node.holders, node.block = {}, 0, -1
        for node in kept.values():
            assert node.parent is not None
            node.parent.children[node.tokens] = node
        for node in held:
            node.holders += 1
        self.nodes[:] = [blocks.get(block) for block in range(len(self.nodes))]
        for block, node in blocks.items():
            node.block = block

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root."""
        pending = [*self.root.children.values()]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node


class Prefix:
    """The position of a sequence in the index: its last full block's node, and the tokens after it.

    It is immutable: operations on a sequence return its new position.
    """

    __slots__ = ("depth", "index", "node", "tail")

    def __init__(self, index: PrefixIndex, node: Node, depth: int, tail: list[int]) -> None:
        self.index = index
        self.node = node
        self.depth = depth
        self.tail = tail

    def hold(self) -> Prefix:
        """Count one more sequence at this position."""
        self.node.holders += 1
        return self

    def append(self, tokens: list[int], block_ids: Sequence[int]) -> Prefix:
        """Go on by tokens; the blocks that they fill can be shared."""
        index, node, depth = self.index, self.node, self.depth
        tail = self.tail + tokens
        size = index.block_size
        full = len(tail) // size
        for number in range(full):
            filled = tuple(tail[number * size : (number + 1) * size])
            node = index.extend(node, filled, block_ids[depth + number])
        if full:
            index.move(self.node, node)
            del tail[: full * size]
        return Prefix(index, node, depth + full, tail)

    def truncate(self, length: int, block_ids: Sequence[int]) -> Prefix:
        """Go back to a length; blocks of tokens that are cut are shared no longer."""
        index, node, tail = self.index, self.node, self.tail
        depth, over = divmod(length, index.block_size)
        for block in block_ids[depth : self.depth]:
            if block >= 0:
                index.forget(block)
        for _ in range(self.depth - depth):
            assert node.parent is not None
            tail = list(node.tokens)
            node = node.parent
        index.move(self.node, node)
        return Prefix(index, node, depth, tail[:over])

    def restore(self, block_ids: Sequence[int]) -> None:
        """Add blocks whose tokens no other block of the index has."""
        for node, block in self.path(block_ids):
            if node.block < 0 and block >= 0:
                node.block = block
                self.index.nodes[block] = node

    def path(self, block_ids: Sequence[int]) -> Iterator[tuple[Node, int]]:
        """Yield the nodes from here to the root, each with the sequence's block of its tokens."""
        node, depth = self.node, self.depth
        while node.parent is not None:
            depth -= 1
            yield node, block_ids[depth]
            node = node.parent

    def drop(self) -> None:
        """End with the sequence."""
        self.node.holders -= 1
        self.index.prune(self.node)
