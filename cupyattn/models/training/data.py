"""Samples from files of JSON: texts, prompts with completions, chats, Alpaca and ShareGPT.

A sample is one text, encoded as a whole. Its tokens are then assigned to the parts that are learnt
by their offsets in the text. Tokenizers do not split at the end of a prompt: sentencepiece puts a
space before each text, and merges cross the boundary. A token is learnt if it has any character
that is learnt, so that each of these characters is predicted once.

Of a chat all answers are learnt, except those whose message has ``"weight": 0``.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.training.batches import Sample
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import lines_of, open_regular, parsed, read_text

_FORMS = (
    'each line is {"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., '
    '"content": ...}, ...]}, Alpaca\'s {"instruction": ..., "input": ..., "output": ...} or '
    'ShareGPT\'s {"conversations": [{"from": ..., "value": ...}, ...]}, or the file is one array '
    "of these"
)
_LONGEST_LINE = 256 << 20
_LARGEST_ARRAY = 1 << 30
_MOST_PATTERN = 1000  # characters of a date's pattern, as in templates without a moment

NAMES = {
    ("text",): "texts",
    ("prompt", "completion"): "prompts and completions",
    ("messages",): "messages",
    ("instruction", "output"): "Alpaca",
    ("conversations",): "ShareGPT",
}
"""Forms of samples, by the names that each object of a form has."""

_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "observation": "tool",
}
"""Roles of chat templates by ShareGPT's names."""

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt of Taori et al., "Stanford Alpaca", 2023, for models without a chat template."""

_LAST_ALONE = (
    "the chat template writes answers in another way once more messages follow: only the last "
    "answer is learnt (for all answers, write a line that ends with each)"
)
_AFTER_PROMPT = (
    "the chat template writes a prompt in another way once its answer follows: only the last "
    "answer is learnt, after its prompt as generation has it"
)
_LEFT_OUT = (
    "the chat template leaves out a part of an answer, such as its reasoning, which is not learnt"
)


class LearntSpan(NamedTuple):
    """A part of a text that is learnt.

    `ragged` says that the text is compared only up to `stop`: a token that goes on after it belongs
    to what follows.
    """

    start: int
    stop: int
    ragged: bool = False

    def has(self, start: int, stop: int) -> bool:
        """Tell whether a token is learnt."""
        return start < self.stop and stop > self.start and not (self.ragged and stop > self.stop)


class SampleText(NamedTuple):
    """The text of a sample, and what of it is learnt: everything if `learnt` is None.

    `bare` says that the tokens which begin and end a text are not written in it.
    """

    text: str
    learnt: tuple[LearntSpan, ...] | None
    bare: bool = True


class Data(NamedTuple):
    """The content of a file.

    Attributes
    ----------
    samples : list of Sample
    forms : mapping from str to int
        How many objects have each form, by its name in ``NAMES``.
    notes : mapping from str to int
        Messages for the user, and how many objects each is about.
    """

    samples: list[Sample]
    forms: Mapping[str, int]
    notes: Mapping[str, int]


class Reader(NamedTuple):
    """Makes samples from objects of JSON.

    Attributes
    ----------
    tokenizer : Tokenizer
        The model's.
    end : int or None
        The token after a text or a completion, which is learnt too. A text that ends with it has no
        second one.
    longest : int
        The most tokens of a sample. Longer texts are cut; lines with a prompt are refused.
    vocab_size : int, optional
        The model's: lines with larger ids are refused.
    moment : datetime, optional
        The date and time for chat templates that print one; by default those of each call. With the
        same moment, the same data are the same samples on another day.
    """

    tokenizer: Tokenizer
    end: int | None
    longest: int
    vocab_size: int | None = None
    moment: datetime | None = None

    def read(self, path: str | os.PathLike[str]) -> list[Sample]:
        """Read all lines of a file, or one array; empty lines are skipped.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            For a line that is not a sample, with its number and the reason.

        Warns
        -----
        UserWarning
            For the notes of `read_data`, such as answers that are not learnt.
        """
        data = self.read_data(path)
        for note, count in data.notes.items():
            warnings.warn(f"{os.fspath(path)}: of {count:,} samples: {note}", stacklevel=2)
        return data.samples

    def read_data(self, path: str | os.PathLike[str]) -> Data:
        """Read a file as `read`, and report the forms of its objects."""
        samples: list[Sample] = []
        forms: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        for where, given in _objects(Path(path)):
            names = _form(given, where)
            part, noted = self._part(names, given, where)
            samples += self._cut(part, where)
            forms[NAMES[names]] += 1
            notes.update(noted)
        if not samples:
            why = "; its lines are single tokens, of which nothing is predicted" if forms else ""
            raise error(
                ValueError, f"{os.fspath(path)} has no samples{why}", _FORMS, "pass another file"
            )
        return Data(samples, forms, notes)

    def samples(self, given: Mapping[str, Any], where: str) -> list[Sample]:
        """Make samples from one object; errors name it by `where`.

        Warns
        -----
        UserWarning
            As `read`, for this object.
        """
        part, notes = self._part(_form(given, where), given, where)
        for note in notes:
            warnings.warn(f"{where}: {note}", stacklevel=2)
        return self._cut(part, where)

    def _part(
        self, names: tuple[str, ...], given: Mapping[str, Any], where: str
    ) -> tuple[SampleText, list[str]]:
        """Return the text of an object of a form, and notes about it."""
        if names == ("text",):
            return SampleText(_text(given, "text", where), None), []
        if names == ("prompt", "completion"):
            pair = (_text(given, name, where) for name in names)
            return _answered(*pair), []
        if names != ("instruction", "output"):
            return self._chat(_messages(given, names[0], where), _tools(given, where), where)
        if getattr(self.tokenizer, "chat_template", None) is None:
            return _alpaca_text(given, where), []
        return self._chat(_alpaca_messages(given, where), None, where)

    def _chat(
        self, messages: list[Any], tools: list[Any] | None, where: str
    ) -> tuple[SampleText, list[str]]:
        """Return a chat as one text, and where its answers are.

        A template that marks answers by ``{% generation %}`` blocks is believed. Otherwise answers
        are where the text of fewer messages ends. Messages after the last answer that is learnt are
        left out.
        """
        written_by = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        answers = [i for i in written_by if messages[i].get("weight", 1)]
        if not answers:
            raise _bad(
                where,
                "all answers have the weight 0"
                if written_by
                else "none of its messages is of the assistant",
                "add an answer to learn, or remove the line",
            )
        messages = messages[: answers[-1] + 1]
        written_by = [i for i in written_by if i < len(messages)]
        chat = _Chat(self, messages, tools, where)
        text, marked = chat.rendered(len(messages), False)
        written = _without_spaces(text)
        whole = all(_without_spaces(messages[i]["content"]) in written for i in answers)
        notes = [] if whole else [_LEFT_OUT]
        if marked:
            if len(answers) < len(written_by):
                if len(marked) != len(written_by):
                    raise _bad(
                        where,
                        f"the chat template marks {len(marked)} parts of {len(written_by)} "
                        "answers, of which one has the weight 0",
                        "remove the weights, or write a line that ends with each answer to learn",
                    )
                pairs = zip(written_by, marked, strict=True)
                marked = [span for i, span in pairs if i in answers]
            return SampleText(text, tuple(LearntSpan(*each) for each in marked), bare=False), notes
        found = [chat.answer(text, i) for i in answers]
        if found[-1] is None:
            if (last := chat.last_answer(text)) is not None:
                return last, [*notes, _AFTER_PROMPT]
            raise _bad(
                where,
                f"the chat template writes what is before message {answers[-1]} in another way "
                "once more messages follow",
                "write it as a prompt and a completion",
            )
        known = [span for span in found if span is not None]
        if len(known) < len(found):
            return SampleText(text, (known[-1],), bare=False), [*notes, _LAST_ALONE]
        return SampleText(text, tuple(known), bare=False), notes

    def _tokens(self, part: SampleText, where: str) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text, and whether each is learnt."""
        try:
            ids, spans, begun = self.tokenizer.encode_with_spans(
                part.text, special_tokens=part.bare
            )
        except ValueError as failure:
            raise ValueError(f"{where}: {failure}") from failure
        learnt, before = [], 0
        for start, stop in spans:
            # A token of spaces may have no offsets of its own: it is all since the token before it.
            first = start if stop > start else min(before, start)
            learnt.append(part.learnt is None or any(s.has(first, stop) for s in part.learnt))
            before = max(before, stop)
        if not part.bare:
            return ids, learnt
        if ids[begun : 2 * begun] == ids[:begun]:  # the text begins with them too
            ids, learnt = ids[begun:], learnt[begun:]
        if self.end is not None and ids[-1:] != [self.end]:
            ids, learnt = [*ids, self.end], [*learnt, True]
        return ids, learnt

    def _cut(self, part: SampleText, where: str) -> list[Sample]:
        ids, learnt = self._tokens(part, where)
        if self.vocab_size is not None and (most := max(ids, default=0)) >= self.vocab_size:
            raise error(
                ValueError,
                f"{where} has the token {most}, as {self.tokenizer!r} writes it",
                f"tokens of the model are 0 to {self.vocab_size - 1}",
                "put the tokenizer of this model into its folder",
            )
        if len(ids) > self.longest and part.learnt is not None:
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


class _Chat(NamedTuple):
    """The messages of a chat, which ends with an answer, and the tools that its template may write.

    A template writes the first messages alone as well: with a prompt for the next answer or not.
    """

    reader: Reader
    messages: list[Any]
    tools: list[Any] | None
    where: str

    def rendered(self, count: int, prompts: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first messages, and the answers that the template marks."""
        moment = self.reader.moment
        more: dict[str, Any] = {} if moment is None else {"strftime_now": _clock(moment)}
        if self.tools is not None:
            more["tools"] = self.tools
        try:
            return self.reader.tokenizer.render_chat(
                self.messages[:count], add_generation_prompt=prompts, **more
            )
        except ValueError as failure:
            raise ValueError(f"{self.where}: {failure}") from failure

    def answer(self, text: str, i: int) -> LearntSpan | None:
        """Return where message i is in the text of all; None if the text has another form of it.

        It begins after the prompt for it. Some prompts end with the first words of an answer, such
        as <think>, that answers of a chat lack: then it begins where the prompt differs. It ends
        where the text of the messages up to it ends; templates that write an end of all messages
        differ there.
        """
        prompt, _ = self.rendered(i, True)
        start = _shared(text, prompt)
        if start < len(prompt):
            before, _ = self.rendered(i, False)
            if not text.startswith(before):
                return None
        until = text
        if i + 1 < len(self.messages):
            until, _ = self.rendered(i + 1, False)
        stop = _shared(text, until)
        ragged = stop < len(until)
        content = _without_spaces(self.messages[i]["content"])
        if stop <= start or (ragged and content not in _without_spaces(text[start:stop])):
            return None
        return LearntSpan(start, stop, ragged)

    def last_answer(self, text: str) -> SampleText | None:
        """Return the last answer of `text` after the prompt for it; None if it cannot be found.

        Templates such as Mistral's write the system message into the last message alone, if that is
        a question: prompts of generation have it, and the text of a chat that ends with an answer
        lacks it. The answer is what follows the end that the last question has in the prompt.
        """
        prompt, _ = self.rendered(len(self.messages) - 1, True)
        asked = self.messages[-2]["content"].strip() if len(self.messages) > 1 else ""
        answered = self.messages[-1]["content"].strip()
        _, _, end = prompt.rpartition(asked) if asked else ("", "", "")
        before, _, _ = text.rpartition(answered) if answered else ("", "", "")
        asked_at = before.rfind(asked + end) if end else -1
        if asked_at < 0:
            return None
        answer = text[asked_at + len(asked) + len(end) :]
        if answered not in answer:
            return None
        whole = prompt + answer
        return SampleText(whole, (LearntSpan(len(prompt), len(whole)),), bare=False)


def _without_spaces(text: str) -> str:
    """Return a text to compare with one that a template has trimmed, or broken into lines."""
    return "".join(text.split())


def _shared(text: str, other: str) -> int:
    """Return how many characters two texts have in common at the beginning."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(text), len(other)))


def _clock(moment: datetime) -> Callable[[str], str]:
    """Return the function by which a template writes a date."""

    def strftime_now(pattern: str) -> str:
        if len(pattern) > _MOST_PATTERN:
            raise ValueError(f"it writes a date by more than {_MOST_PATTERN} characters")
        return moment.strftime(pattern)

    return strftime_now


def _form(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the names by which an object has one of the forms."""
    known = [name for names in NAMES for name in names if name in given]
    if "instruction" in given and "output" in given and "text" in known:
        known.remove("text")  # Alpaca's own files have its prompt there as well
    if known == ["prompt", "messages"]:
        known.remove("prompt")  # UltraChat's files have the first message there as well
    if tuple(known) in NAMES:
        return tuple(known)
    raise _bad(
        where,
        f"it has {', '.join(map(repr, known or given)) or 'nothing'}",
        "use the names of one of these forms alone",
    )


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    text = given[name]
    if not isinstance(text, str) or not text:
        raise _bad(where, f"its {name} is {shown(text)}", "write a text that is not empty")
    return text


def _optional(given: Mapping[str, Any], name: str, where: str) -> str:
    return _text(given, name, where) if given.get(name) else ""


def _answered(prompt: str, completion: str) -> SampleText:
    text = prompt + completion
    return SampleText(text, (LearntSpan(len(prompt), len(text)),))


def _alpaca_text(given: Mapping[str, Any], where: str) -> SampleText:
    for name in ("system", "history"):
        if given.get(name):
            raise _bad(
                where,
                f"its {name} is {shown(given[name])}, and the model has no chat template",
                "remove it, or take a model that has one",
            )
    more, asked = _optional(given, "input", where), _text(given, "instruction", where)
    prompt = _ALPACA.format(
        ", paired with an input that provides further context" if more else "",
        asked,
        f"### Input:\n{more}\n\n" if more else "",
    )
    return _answered(prompt, _text(given, "output", where))


def _alpaca_messages(given: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    system = _optional(given, "system", where)
    earlier = given.get("history") or []
    pairs = isinstance(earlier, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(each, str) for each in turn)
        for turn in earlier
    )
    if not pairs:
        raise _bad(where, f"its history is {shown(earlier)}", "write pairs of two texts")
    asked = [_text(given, "instruction", where), _optional(given, "input", where)]
    turns = [*earlier, ["\n\n".join(filter(None, asked)), _text(given, "output", where)]]
    found = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found


def _messages(given: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Return the messages of a chat; those of ShareGPT by the names of chat templates."""
    messages = given[name]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise _bad(where, f"its {name} are {shown(messages)}", "write a list of objects")
    found = []
    for number, each in enumerate(messages):
        if "from" in each and "role" not in each:
            role = each["from"]
            if isinstance(role, str) and role not in _ROLES:
                raise _bad(
                    where,
                    f"its message {number} is from {shown(role)}",
                    f"write one of {', '.join(_ROLES)}",
                )
            each = {
                "role": _ROLES[role] if isinstance(role, str) else role,
                "content": each.get("value"),
                **({"weight": each["weight"]} if "weight" in each else {}),
            }
        for key in ("role", "content"):
            if not isinstance(each.get(key), str):  # a template would write "None", or nothing
                raise _bad(
                    where,
                    f"its message {number} has the {key} {shown(each.get(key))}",
                    "write a text",
                )
        if each.get("weight", 1) not in (0, 1):
            raise _bad(
                where,
                f"its message {number} has the weight {shown(each['weight'])}",
                "write 1 for an answer that is learnt, 0 for one that is not",
            )
        found.append(each)
    system = _optional(given, "system", where) if name == "conversations" else ""
    if system and (not found or found[0]["role"] != "system"):
        found.insert(0, {"role": "system", "content": system})
    return found


def _tools(given: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the tools that a chat template writes; ShareGPT's files have them as a JSON text."""
    tools = given.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = parsed(tools, f"{where}: its tools", _no_tools, constants=False)
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise _no_tools(where, f"its tools are {shown(tools)}")
    return tools or None


def _no_tools(where: str, what: str) -> ValueError:
    return _bad(where, what, "write a list of objects, or remove the tools")


def _objects(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a file of lines, or of one array, with their places."""
    with open_regular(path, _unread) as file:
        begins = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not begins.startswith(b"["):
        for number, line in _lines(path):
            where = f"line {number} of {path}"
            yield where, _object(parsed(line, where, _no_object, constants=False), where)
        return
    text = read_text(path, _LARGEST_ARRAY, _unread).removeprefix("\ufeff")
    for number, given in enumerate(parsed(text, str(path), _no_object, constants=False), 1):
        where = f"item {number} of {path}"
        yield where, _object(given, where)


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


def _object(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise _no_object(where, f"it is {shown(given)}")
    return given


def _no_object(where: str, what: str) -> ValueError:
    return _bad(where, what, "write one object a line, or one array of objects")


def _unread(where: str, what: str) -> ValueError:
    return _bad(where, what, "pass a regular file of shorter lines")


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
