"""The values that a file gives by name, JSON or GGUF metadata, read as what they should be."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from cupyattn.models.checkpoints.contents import damaged
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown

_LARGEST_COUNT = 2**31 - 1  # kernels count in int32
_LARGEST_ID = 2**32 - 1  # ids of GGUF are uint32, whose largest means none
_LARGEST_NUMBER = 3e38  # float32 ends there


class Fields(NamedTuple):
    """Values by name; null is as if absent.

    A read returns a value of its type, or raises an error with the file, the name, the value and
    what is allowed: ValueError if the file must be damaged, NotImplementedError if there may be
    such a model but no code for it. `where` is the file, and `prefix` comes before all names.
    """

    given: Json
    where: str
    prefix: str = ""
    refuse_file: Callable[[str, str], Exception] = damaged

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST_COUNT
    ) -> int:
        """Return a count of at least `least`; a list, one for each layer, is not supported."""
        value = self._value(name, default)
        if isinstance(value, list) and self.refuse_file is damaged:
            raise self._unsupported(name, value, "one number for all layers")
        if not _is_integer(value) or not least <= value <= most:
            raise self._damaged(name, value, f"an integer from {least} to {most}")
        return int(value)

    def number(
        self, name: str, default: float | None = None, *, zero_allowed: bool = False
    ) -> float:
        """Return a finite number above 0, or 0 if that is allowed."""
        value = self._value(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 <= value <= _LARGEST_NUMBER or not (value or zero_allowed):
            raise self._damaged(name, value, "a finite number above 0")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0."""
        value = self._value(name, None)
        found = value if isinstance(value, list) else [None]
        one = [Fields({name: each}, self.where, "", self.refuse_file) for each in found]
        return tuple([each.number(name) for each in one])

    def words(self, name: str, allowed: Collection[str], count: int) -> tuple[str, ...] | None:
        """Return one of the allowed words for each of so many layers, or None if it is absent."""
        value = self.given.get(self.prefix + name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count:
            raise self._damaged(name, value, f"a list of {count} words")
        for each in value[:count]:
            if each not in allowed:
                raise self._unsupported(name, each, ", ".join(map(repr, allowed)))
        return tuple(value[:count])

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._damaged(name, value, "true or false")
        return value

    def object(self, name: str) -> Json:
        """Return a JSON object, an empty one if it is absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._damaged(name, value, "a JSON object")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token or the tokens of a name, none if it is absent; -1 is no token."""
        value = self._value(name, [])
        found = value if isinstance(value, list) else [value]
        if not all(_is_integer(each) and -1 <= each <= _LARGEST_ID for each in found):
            raise self._damaged(name, value, "a token id")
        return tuple(each for each in found if each not in (-1, _LARGEST_ID))

    def choice(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return one of the allowed words."""
        value = self.given.get(self.prefix + name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self._unsupported(name, value, ", ".join(map(repr, allowed)))
        return value

    def refuse(self, name: str, allowed: Any = None) -> None:
        """Refuse a trait unless it is absent or has the allowed value, which means the same."""
        value = self.given.get(self.prefix + name)
        value = allowed if value is None else value
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            code = "models without it" if allowed is None else repr(allowed)
            raise self._unsupported(name, value, code)

    def _value(self, name: str, default: Any) -> Any:
        value = self.given.get(self.prefix + name)
        if value is None:
            value = default
        if value is None:
            raise self.refuse_file(self.where, f"it has no {self.prefix}{name}")
        return value

    def _damaged(self, name: str, value: Any, what: str) -> Exception:
        return self.refuse_file(
            self.where, f"{self.prefix}{name} is {shown(value)}, which is not {what}"
        )

    def _unsupported(self, name: str, value: Any, code: str) -> Exception:
        return error(
            NotImplementedError,
            f"{self.where}: {self.prefix}{name} is {shown(value)}",
            f"there is code for {code}",
            "load a model of that kind",
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
