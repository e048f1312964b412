"""Speculative decoding without a second model: what followed these tokens before.

Prompt lookup (Saxena, 2023, "Prompt Lookup Decoding"): the last tokens are looked for earlier in
the text, and what followed there is a draft of what follows now. The model computes all of the
draft in one step, and keeps what it would have chosen itself: Leviathan et al., arXiv:2211.17192,
for the greedy choice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cupyattn import OutOfBlocksError
from cupyattn.kv_cache import Work

LONGEST_MATCH = 3
"""Tokens that must have stood before in this order; if they have not, fewer are looked for."""


def draft(tokens: Sequence[int], count: int) -> list[int]:
    """Return at most `count` tokens that followed the last ones when they stood before.

    The longest match counts, and of several the latest.

    Examples
    --------
    >>> draft([5, 6, 7, 8, 9, 1, 6, 7], 2)
    [8, 9]
    >>> draft([1, 2, 3], 2)
    []
    """
    text = array("i", tokens)
    width, whole = text.itemsize, text.tobytes()
    for size in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        last = whole[-size * width :]
        at = whole.rfind(last, 0, len(whole) - width)
        while at >= 0 and at % width:  # bytes of two tokens are no match
            at = whole.rfind(last, 0, at + len(last) - 1)
        if at >= 0:
            begin = at // width + size
            return text[begin : begin + count].tolist()
    return []


def accepted(drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the tokens that the model chose: its own after each draft that agrees with it.

    `chosen` are the model's choices behind the last token and behind each of the draft.

    Examples
    --------
    >>> accepted([8, 9, 4], [8, 9, 5, 7])
    [8, 9, 5]
    """
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == chosen[agreed]:
        agreed += 1
    return list(chosen[: agreed + 1])


def padded(drafts: list[list[int]], count: int) -> list[list[int]]:
    """Return drafts that all have `count` tokens, if any draft has one.

    Any tokens will do: most of them are refused.

    Examples
    --------
    >>> padded([[8, 9], []], 3)
    [[8, 9, 0], [0, 0, 0]]
    """
    return [[*each, *[0] * (count - len(each))] for each in drafts] if any(drafts) else drafts


def appended(batch: Sequence[Work], drafts: Sequence[Sequence[int]]) -> bool:
    """Append each draft to its sequence; where there are no blocks for all, append none.

    The scheduler has just appended a token: no sequence shares its last block, and none is copied
    here.
    """
    lengths = [len(work.sequence) for work in batch]
    try:
        for work, drafted in zip(batch, drafts, strict=True):
            work.sequence.append(drafted)
    except OutOfBlocksError:
        for work, length in zip(batch, lengths, strict=True):
            work.sequence.truncate(length)
        return False
    return True


def kept(
    batch: Sequence[Work], drafts: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Take back what the model refused; return what each sample of the batch goes on with."""
    results = []
    for work, drafted, found in zip(batch, drafts, chosen, strict=True):
        tokens = accepted(drafted, found)
        work.sequence.truncate(len(work.sequence) - len(drafted) + len(tokens) - 1)
        results.append([tokens])
    return results
