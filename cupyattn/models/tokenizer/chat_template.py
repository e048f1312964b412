"""Chat templates: Jinja, as transformers runs it, in its sandbox and within limits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.template_budget import budget
from cupyattn.runtime.errors import error
from cupyattn.runtime.fork import no_fork

MOST_TEMPLATE = 1 << 17
"""The most characters of a template; the longest that models come with have some 40,000."""


def rendered(template: str, where: str | None = None, /, **variables: Any) -> str:
    """Return the text that a template makes of its variables.

    A template is a program that came with the weights: it may be damaged or malicious. It runs
    in Jinja's sandbox, and within a `Budget`: 10 seconds, texts of 4 million characters or 8
    times the size of the variables, integers of 1024 bits.

    Parameters
    ----------
    template : str
        The Jinja source.
    where : str, optional
        The file that it was read from, for errors.
    **variables
        What the template knows.

    Raises
    ------
    ValueError
        If the template is wrong, exceeds a limit, or refuses the variables.
    """
    extra("jinja2", "runs chat templates")
    try:
        return _rendered(template, variables)
    except Exception as failure:  # it may raise whatever Python raises, MemoryError as well
        of = f"{where}: " if where else ""
        told = f"{of}the chat template failed: {_told(failure)}"
        raise error(
            ValueError,
            told,
            "messages are dicts of 'role' and 'content', mostly user and assistant in turn, and a "
            "template makes of them little more than their text",
            "pass messages that the model's template takes, or set tokenizer.chat_template",
        ) from failure


def _rendered(template: str, variables: dict[str, Any]) -> str:
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"it has {len(template)} characters, and at most {MOST_TEMPLATE} are read")
    with budget(variables) as left:
        parts, length = [], 0
        for part in _compiled(template).generate(**variables):
            parts.append(part)
            length += len(part)
            left.spend(len(part))
            left.require_room(length)
    text = "".join(parts)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it writes halves of surrogate pairs, which are no characters") from None
    return text


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    with no_fork():
        from cupyattn.models.tokenizer.template_sandbox import Sandbox
    return Sandbox().from_string(template)


def _told(failure: Exception) -> str:
    text = str(failure).encode("utf-8", "backslashreplace").decode()
    kind = type(failure).__name__
    return text if text and type(failure).__module__ != "builtins" else f"{kind} {text}".rstrip()
