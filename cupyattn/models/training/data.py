"""Samples from a file of JSON lines: texts, prompts with completions, chats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.training.batches import Sample
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import lines_of, parsed

_FORMS = (
    'each line is {"text": ...}, {"prompt": ..., "completion": ...} or '
    '{"messages": [{"role": ..., "content": ...}, ...]}'
)
_LONGEST_LINE = 256 << 20
Piece = tuple[list[int], bool]
"""Tokens, and whether they are learnt."""


class Reader(NamedTuple):
    """Makes samples from lines.

    Attributes
    ----------
    tokenizer : Tokenizer
        The model's.
    end : int or None
        The token after a text or a completion, which is learnt too.
    longest : int
        The most tokens of a sample. Longer texts are cut; lines with a prompt are refused.
    vocab_size : int, optional
        The model's: lines with larger ids are refused.
    """

    tokenizer: Tokenizer
    end: int | None
    longest: int
    vocab_size: int | None = None

    def read(self, path: str | os.PathLike[str]) -> list[Sample]:
        """Read all lines of a file; empty ones are skipped.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            For a line that is not a sample, with its number and the reason.
        """
        samples, number = [], 0
        for number, line in _lines(Path(path)):
            where = f"line {number} of {os.fspath(path)}"
            samples += self.samples(_object(line, where), where)
        if not samples:
            why = "; its lines are single tokens, of which nothing is predicted" if number else ""
            raise error(
                ValueError, f"{os.fspath(path)} has no samples{why}", _FORMS, "pass another file"
            )
        return samples

    def samples(self, given: Mapping[str, Any], where: str) -> list[Sample]:
        """Make samples from one line's object; errors name it by `where`."""
        forms = {
            ("text",): self._text,
            ("prompt", "completion"): self._completion,
            ("messages",): self._chat,
        }
        known = [name for names in forms for name in names if name in given]
        if tuple(known) in forms:
            return self._cut(forms[tuple(known)](given, where), where)
        raise _bad(
            where,
            f"it has {', '.join(map(repr, known or given)) or 'nothing'}",
            "use the names of one of these forms alone",
        )

    def _text(self, given: Mapping[str, Any], where: str) -> list[Piece]:
        return [(self._encoded(given, "text", where, begins=True), True), (self._end(), True)]

    def _completion(self, given: Mapping[str, object], where: str) -> list[Piece]:
        return [
            (self._encoded(given, "prompt", where, begins=True), False),
            (self._encoded(given, "completion", where), True),
            (self._end(), True),
        ]

    def _chat(self, given: Mapping[str, object], where: str) -> list[Piece]:
        """Cut a chat where answers begin and end: only answers are learnt.

        The parts are encoded one by one, as a prompt is when the model is used.
        """
        messages = given["messages"]
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise _bad(where, f"its messages are {shown(messages)}", "write a list of objects")
        for number, each in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(each.get(name), str):  # a template would write "None", or nothing
                    raise _bad(
                        where,
                        f"its message {number} has the {name} {shown(each.get(name))}",
                        "write a text",
                    )
        answers = [i for i, each in enumerate(messages) if each.get("role") == "assistant"]
        if not answers:
            raise _bad(
                where,
                "none of its messages is of the assistant",
                "add an answer to learn, or remove the line",
            )
        pieces: list[Piece] = []
        done = ""
        for i in answers:
            for until, prompts, learnt in ((i, True, False), (i + 1, False, True)):
                text = self._rendered(messages[:until], prompts, where)
                if not text.startswith(done):
                    raise _bad(
                        where,
                        f"the chat template writes what is before message {until} in another way "
                        "once more messages follow",
                        "write it as a prompt and a completion",
                    )
                pieces.append((self._ids(text[len(done) :], where), learnt))
                done = text
        return pieces

    def _rendered(self, messages: list[Any], prompts: bool, where: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompts)
        except ValueError as failure:
            raise ValueError(f"{where}: {failure}") from failure

    def _encoded(
        self, given: Mapping[str, object], name: str, where: str, *, begins: bool = False
    ) -> list[int]:
        text = given[name]
        if not isinstance(text, str) or not text:
            raise _bad(where, f"its {name} is {shown(text)}", "write a text that is not empty")
        return self._ids(text, where, begins=begins)

    def _ids(self, text: str, where: str, *, begins: bool = False) -> list[int]:
        try:
            return self.tokenizer.encode(text, special_tokens=begins)
        except ValueError as failure:
            raise ValueError(f"{where}: {failure}") from failure

    def _end(self) -> list[int]:
        return [] if self.end is None else [self.end]

    def _cut(self, pieces: list[Piece], where: str) -> list[Sample]:
        ids = [each for tokens, _ in pieces for each in tokens]
        if self.vocab_size is not None and (most := max(ids, default=0)) >= self.vocab_size:
            raise error(
                ValueError,
                f"{where} has the token {most}, as {self.tokenizer!r} writes it",
                f"tokens of the model are 0 to {self.vocab_size - 1}",
                "put the tokenizer of this model into its folder",
            )
        learnt = [flag for tokens, flag in pieces for _ in tokens]
        if len(ids) > self.longest and not all(learnt):
            raise error(
                ValueError,
                f"{where} has {len(ids)} tokens",
                f"a sample has at most {self.longest}, and a prompt stays with its answer",
                "raise --max-length and --batch-tokens, up to the model's positions, or shorten or "
                "remove the line",
            )
        cuts = range(0, len(ids), self.longest)
        made = [
            Sample.of(ids[at : at + self.longest], learnt[at : at + self.longest]) for at in cuts
        ]
        return [sample for sample in made if sample.num_labels]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in lines_of(path, _LONGEST_LINE, _unread):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as failure:
            raise _bad(
                f"line {number} of {path}", f"it is not UTF-8: {failure}", "save it as UTF-8"
            ) from None
        if text:
            yield number, text


def _object(line: str, where: str) -> Mapping[str, object]:
    given = parsed(line, where, _no_object, constants=False)
    if not isinstance(given, dict):
        raise _no_object(where, f"it is {shown(given)}")
    return given


def _no_object(where: str, what: str) -> ValueError:
    return _bad(where, what, "write one object a line")


def _unread(where: str, what: str) -> ValueError:
    return _bad(where, what, "pass a file of shorter lines")


def _bad(where: str, what: str, fix: str) -> ValueError:
    return error(ValueError, f"{where}: {what}", _FORMS, fix)


def split(
    samples: Sequence[Sample], fraction: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Split samples into those that are learnt, and a random fraction that is held back.

    Examples
    --------
    >>> sample = Sample.of([1, 2], [True, True])
    >>> [len(part) for part in split([sample] * 10, 0.25, 0)]
    [8, 2]
    """
    if not 0 <= fraction < 1:
        raise error(
            ValueError,
            f"a fraction of {fraction}",
            "it must be at least 0 and below 1",
            "pass for example 0.1",
        )
    order = np.random.default_rng([seed, 1]).permutation(len(samples)).tolist()
    held = min(int(len(samples) * fraction), len(samples) - 1)
    return [samples[i] for i in sorted(order[held:])], [samples[i] for i in sorted(order[:held])]
