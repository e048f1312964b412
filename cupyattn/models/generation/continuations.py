"""A prompt on its way through a generator: its samples, their tokens and their text."""

from __future__ import annotations

from collections import deque

from cupyattn.kv_cache import Request, Work
from cupyattn.models.generation.inputs import Draw
from cupyattn.models.generation.lookup import draft
from cupyattn.models.generation.options import SEED_BITS, Ends, Prompt, Sampling
from cupyattn.models.generation.text import TextStream, Tokenizer


class Generation:
    """The continuations of one prompt so far, which `Generator.submit` returns.

    Attributes
    ----------
    request : Request
        The scheduler's; ``request.finished`` tells whether all samples have ended.
    outputs : tuple of list of int
        The new tokens of each sample, with the one that ended it.
    seed : int
        Sample s draws with seed + s: given again it gives the same tokens.
    """

    def __init__(
        self,
        prompt: Prompt,
        request: Request,
        sampling: Sampling,
        seed: int,
        ends: Ends,
        tokenizer: Tokenizer | None,
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

    def draws(self, work: Work) -> list[Draw]:
        """Return what a step draws for a work of its request."""
        return [self._draw(work, sample) for sample in work.samples]

    def _draw(self, work: Work, sample: int) -> Draw:
        output = self.request.outputs[sample]
        penalised = self._sampling.repetition_penalty != 1.0
        return Draw(
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
        """Return at most so many tokens that may follow those of a work's only sample."""
        (sample,) = work.samples
        request, output = self.request, self.request.outputs[sample]
        room = request.max_new_tokens - len(output) - 1
        return draft((*request.tokens, *output), min(count, room))

    def end(self) -> None:
        """Count every sample as ended: it was cancelled."""
        for sample in sorted(self._open):
            self._close(sample)

    def take(self) -> list[int]:
        """Take what the last step drew; return the samples whose text a string has ended."""
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
        """Pass a token on; return whether it has completed a string that ends the text."""
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
