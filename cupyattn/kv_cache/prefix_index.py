"""Which full block holds which tokens after which prefix: a tree whose edges are blocks of tokens.

A node stands for a prefix of whole blocks. Its children are found by their tokens in a dict: Python
hashes the tokens and, where the hash agrees, compares them. So the place in the tree is the chained
hash of other libraries, equal blocks after different prefixes are different nodes, and no collision
can share a wrong block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Node:
    """A prefix of whole blocks: its last block's tokens behind its parent's prefix.

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

        A token is always left over: only from a token that is computed do logits come.
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

    def prune(self, node: Node) -> None:
        """Remove a node that nothing needs, and what only it needed."""
        parent = node.parent
        while parent and not node.children and not node.holders and node.block < 0:
            del parent.children[node.tokens]
            node, parent = parent, parent.parent

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root."""
        pending = [*self.root.children.values()]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node


class Prefix:
    """Where a sequence stands in the index: its last full block's node, the tokens behind it."""

    __slots__ = ("depth", "index", "node", "tail")

    def __init__(self, index: PrefixIndex, node: Node, depth: int, tail: list[int]) -> None:
        self.index = index
        self.node = node
        self.depth = depth
        self.tail = tail
        node.holders += 1

    def fork(self) -> Prefix:
        """Return the same for another sequence."""
        return Prefix(self.index, self.node, self.depth, self.tail[:])

    def append(self, tokens: list[int], block_ids: Sequence[int]) -> None:
        """Go on by tokens; the blocks that they fill can be shared."""
        tail, size = self.tail, self.index.block_size
        tail += tokens
        if len(tail) >= size:
            node = self.node
            full = len(tail) // size
            for number in range(full):
                block = block_ids[self.depth + number]
                node = self.index.extend(
                    node, tuple(tail[number * size : (number + 1) * size]), block
                )
            del tail[: full * size]
            self._move(node, self.depth + full)

    def truncate(self, length: int, block_ids: Sequence[int]) -> None:
        """Go back to a length; blocks of tokens that are cut are shared no longer."""
        depth, over = divmod(length, self.index.block_size)
        for block in block_ids[depth : self.depth]:
            if block >= 0:
                self.index.forget(block)
        node = self.node
        for _ in range(self.depth - depth):
            assert node.parent is not None
            self.tail = list(node.tokens)
            node = node.parent
        del self.tail[over:]
        self._move(node, depth)

    def restore(self, block_ids: Sequence[int]) -> None:
        """Share blocks that hold anew what no block of the index does."""
        node, depth = self.node, self.depth
        while node.parent is not None:
            depth -= 1
            if node.block < 0 and block_ids[depth] >= 0:
                node.block = block_ids[depth]
                self.index.nodes[node.block] = node
            node = node.parent

    def drop(self) -> None:
        """End with the sequence."""
        self.node.holders -= 1
        self.index.prune(self.node)

    def _move(self, node: Node, depth: int) -> None:
        node.holders += 1
        self.drop()
        self.node, self.depth = node, depth
