"""A prompt in a generator: its samples, their tokens and text, and drafts of what follows.

Drafts are speculative decoding without a second model. Prompt lookup (Saxena, 2023, "Prompt Lookup
Decoding") finds the last tokens earlier in the text, and proposes what followed them there. The
model computes the whole draft in one step and keeps what it would have chosen itself (Leviathan et
al., arXiv:2211.17192, for the greedy choice).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from cupyattn import OutOfBlocksError
from cupyattn.kv_cache import Request, Work
from cupyattn.models.generation.options import SEED_BITS, Ends, Prompt, Sampling
from cupyattn.models.generation.steps import TokenDraw
from cupyattn.models.generation.text import TextStream, TextTokenizer

LONGEST_MATCH = 3
"""Tokens to search for; if they did not occur in this order, fewer are searched for."""


def draft(tokens: Sequence[int], count: int) -> list[int]:
    """Return at most `count` tokens that followed an earlier occurrence of the last tokens.

    The longest match counts, and the latest of several.

    >>> draft([5, 6, 7, 8, 9, 1, 6, 7], 2)
    [8, 9]
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

    `chosen` has the model's choice after the last token, and after each token of the draft.
    """
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == chosen[agreed]:
        agreed += 1
    return list(chosen[: agreed + 1])


def padded(drafts: list[list[int]], count: int) -> list[list[int]]:
    """Return drafts that all have `count` tokens, if any draft has one.

    >>> padded([[8, 9], []], 3)
    [[8, 9, 0], [0, 0, 0]]
    """
    return [[*each, *[0] * (count - len(each))] for each in drafts] if any(drafts) else drafts


def appended(batch: Sequence[Work], drafts: Sequence[Sequence[int]]) -> bool:
    """Append each draft to its sequence, or none if there are not enough blocks for all.

    The scheduler has just appended a token, so no sequence shares its last block and none is
    copied.
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
    """Remove the tokens that the model refused; return what each sample goes on with."""
    results = []
    for work, drafted, found in zip(batch, drafts, chosen, strict=True):
        tokens = accepted(drafted, found)
        work.sequence.truncate(len(work.sequence) - len(drafted) + len(tokens) - 1)
        results.append([tokens])
    return results


class Generation:
    """The continuations of one prompt so far, returned by `Generator.submit`.

    Attributes
    ----------
    request : Request
        The scheduler's; ``request.finished`` tells whether all samples have ended.
    outputs : tuple of list of int
        The new tokens of each sample, with the one that ended it.
    seed : int
        Sample s draws with seed + s. The same seed gives the same tokens again.
    """

    def __init__(
        self,
        prompt: Prompt,
        request: Request,
        sampling: Sampling,
        seed: int,
        ends: Ends,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self.request = request
        self.seed = seed
        self.outputs: tuple[list[int], ...] = tuple([] for _ in range(request.n))
        self._prompt = prompt
        self._sampling = sampling
        self._ends = ends
        self._seen = [0] * request.n
        self._news: deque[int | str] = deque()
        self._streams: list[TextStream] = []
        if tokenizer is not None:
            self._streams = [
                TextStream(tokenizer, prompt.ids, ends.strings) for _ in range(request.n)
            ]
        self._open = set(range(request.n))

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(output)) for output in self.outputs)
        state = "finished" if self.finished else "not finished"
        return f"<Generation of {len(self._prompt.ids)} tokens, {lengths} new ones, {state}>"

    @property
    def finished(self) -> bool:
        """Whether all of its samples have ended."""
        return not self._open

    @property
    def results(self) -> list[list[int]] | list[str]:
        """The new text of each sample for a prompt of text, otherwise the new token ids."""
        if self._prompt.is_text:
            return [stream.text for stream in self._streams]
        return [output[:] for output in self.outputs]

    def news(self) -> list[int | str]:
        """Return the pieces of text, or token ids, of all samples since the last call."""
        found = list(self._news)
        self._news.clear()
        return found

    def draws(self, work: Work) -> list[TokenDraw]:
        """Return the draws of a step for a work of this request."""
        return [self._draw(work, sample) for sample in work.samples]

    def _draw(self, work: Work, sample: int) -> TokenDraw:
        output = self.request.outputs[sample]
        penalised = self._sampling.repetition_penalty != 1.0
        return TokenDraw(
            work.sequence,
            self._sampling,
            (self.seed + sample) % (1 << SEED_BITS),
            (*self.request.tokens, *output) if penalised else (),
            self.request.max_new_tokens - len(output),
        )

    @property
    def greedy(self) -> bool:
        """Whether every token is the one with the largest logit."""
        return not self._sampling.used

    def draft(self, work: Work, count: int) -> list[int]:
        """Return at most so many tokens that may follow those of the only sample of a work."""
        (sample,) = work.samples
        request, output = self.request, self.request.outputs[sample]
        room = request.max_new_tokens - len(output) - 1
        return draft((*request.tokens, *output), min(count, room))

    def end(self) -> None:
        """Count every sample as ended: the request was cancelled."""
        for sample in sorted(self._open):
            self._close(sample)

    def take(self) -> list[int]:
        """Take the drawn tokens of a step; return the samples that a string has ended."""
        ended = []
        for sample in sorted(self._open):
            drawn = self.request.outputs[sample]
            for token in drawn[self._seen[sample] :]:
                self._seen[sample] += 1  # before a decoder may be interrupted
                self.outputs[sample].append(token)
                if self._take(sample, token):
                    break
            self._seen[sample] = len(drawn)
            stopped = bool(self._streams) and self._streams[sample].stopped
            last = self.outputs[sample][-1:]
            if stopped or len(drawn) == self.request.max_new_tokens or self._ends.ids & {*last}:
                self._close(sample)
                if stopped:
                    ended.append(sample)
        return ended

    def _take(self, sample: int, token: int) -> bool:
        """Pass a token on; return whether it completed a string that ends the text."""
        if not self._streams:
            self._news.append(token)
            return False
        stream = self._streams[sample]
        piece = "" if token in self._ends.ids else stream.push(token)
        if not self._prompt.is_text:
            self._news.append(token)
        elif piece:
            self._news.append(piece)
        return stream.stopped

    def _close(self, sample: int) -> None:
        self._open.discard(sample)
        if self._streams and (rest := self._streams[sample].finish()) and self._prompt.is_text:
            self._news.append(rest)
