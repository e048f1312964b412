"""Chat templates: Jinja, as transformers runs it, in its sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from cupyattn.errors import error
from cupyattn.models.extras import extra


def rendered(template: str, **variables: Any) -> str:
    """Return the text that a template makes of its variables.

    Raises
    ------
    ValueError
        If the template is wrong, or refuses them.
    """
    jinja2 = extra("jinja2", "runs chat templates")
    try:
        return _environment().from_string(template).render(**variables)
    except (jinja2.TemplateError, TypeError) as failure:
        raise error(
            ValueError,
            f"the chat template failed: {failure}",
            "messages are dicts of 'role' and 'content', mostly user and assistant in turn",
            "pass messages that the model's template takes",
        ) from failure


@lru_cache(maxsize=1)
def _environment() -> Any:
    # A template is a program that came with the weights: the sandbox keeps it from attributes that
    # lead out of its variables.
    sandbox = extra("jinja2.sandbox", "runs chat templates")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise extra("jinja2", "runs chat templates").TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
