"""The options of adapters: which modules have one, its rank, and its scale.

Regular expressions of module names come with files of adapters. Python's own engine backtracks
without end on patterns such as ``(a+)+b``, and cannot be stopped. The package regex understands the
same patterns, and takes a time limit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.extras import extra
from cupyattn.models.training.optimizer import as_float
from cupyattn.runtime.errors import error, shown

SECONDS = 2.0
"""The time for all matches of one set of patterns; 500 modules take some milliseconds."""

_MOST_CHARACTERS = 1 << 16
_MOST_PAIRS = 1 << 20
_MOST_REPEATS = 1000  # regex copies a group for each required repeat
_SLOW = 1e-3  # a match of less time costs nothing: most take a microsecond
_LEAST_COUNT = re.compile(r"\{(\d+)")
_REPEATS = re.compile(r"[*+?{|(]")


def require_pattern(pattern: Any, *, last_parts: bool) -> None:
    """Raise ValueError for an invalid regular expression of names, or of last parts."""
    failure: Exception
    try:
        if len(pattern) > _MOST_CHARACTERS:
            raise ValueError(f"{len(pattern)} characters; at most {_MOST_CHARACTERS} are read")
        if math.prod(max(int(count), 1) for count in _LEAST_COUNT.findall(pattern)) > _MOST_REPEATS:
            raise ValueError(f"it repeats more than {_MOST_REPEATS} times, counts multiplied")
        re.compile(_whole(pattern, last_parts))  # regex accepts more than PEFT
        _compiled(pattern, last_parts)
        return
    except RuntimeError as missing:
        if not isinstance(missing, RecursionError):
            raise
        failure = missing
    except Exception as other:  # of both packages, which raise OverflowError and MemoryError too
        failure = other
    raise error(
        ValueError,
        f"the pattern {shown(pattern)} ({failure})",
        "modules are named by their last parts or by a regular expression",
        "pass for example ['q_proj', 'v_proj']",
    ) from failure


@lru_cache(maxsize=16)
def matcher(patterns: tuple[str, ...], *, last_parts: bool) -> Matcher:
    """Return the matcher of these patterns, the same object each time.

    With `last_parts` a pattern may match the last parts of a name, as well as the whole name.
    """
    return Matcher(patterns, last_parts)


class Matcher:
    """A set of patterns to match with names; all matches together have `SECONDS`."""

    def __init__(self, patterns: tuple[str, ...], last_parts: bool) -> None:
        self._compiled = {pattern: _compiled(pattern, last_parts) for pattern in patterns}
        self._known: dict[tuple[str, str], bool] = {}
        self._left = SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Tell whether a pattern matches a name; raise ValueError if that takes too long."""
        pair = pattern, name
        if pair not in self._known:
            if len(self._known) == _MOST_PAIRS:
                raise _too_slow(pattern, f"{_MOST_PAIRS} matches of patterns and modules")
            self._known[pair] = self._match(pattern, name)
        return self._known[pair]

    def _match(self, pattern: str, name: str) -> bool:
        compiled, limited = self._compiled[pattern]
        if not limited:
            return compiled.fullmatch(name) is not None
        began = time.perf_counter()
        try:
            if self._left <= 0:
                raise TimeoutError
            return compiled.fullmatch(name, timeout=self._left) is not None
        except (TimeoutError, MemoryError, RecursionError) as failure:
            self._left = 0
            raise _too_slow(pattern, f"more than {SECONDS:g} s") from failure
        finally:
            taken = time.perf_counter() - began
            if taken > _SLOW:
                self._left -= taken


def _compiled(pattern: str, last_parts: bool) -> tuple[Any, bool]:
    """Return a compiled pattern, and whether its matches take a limit: without repeats none do."""
    whole = _whole(pattern, last_parts)
    if not _REPEATS.search(pattern):
        return re.compile(whole), False
    return extra("regex", "matches patterns of modules").compile(whole), True


def _whole(pattern: str, last_parts: bool) -> str:
    return rf"(?:.*\.)?(?:{pattern})" if last_parts else pattern


def _too_slow(pattern: str, taken: str) -> ValueError:
    return error(
        ValueError,
        f"the pattern {shown(pattern)} takes {taken} to match modules",
        "a pattern must match within microseconds",
        "pass a list of names, or a pattern without repeats within repeats",
    )


ALL_LINEAR = "all-linear"
_MOST_RANK = 1 << 16
_A_NAME = re.compile(r"\w+")


class LoraOptions(NamedTuple):
    """The options of `LoraAdapters`, named there, as PEFT understands them."""

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float] = {}
    use_rslora: bool = False
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()

    def checked(self) -> LoraOptions:
        """Return valid options as plain numbers, the targets as a tuple or a string, or raise."""
        if not isinstance(self.use_rslora, bool | np.bool_):
            raise error(
                TypeError,
                f"use_rslora = {shown(self.use_rslora)}",
                "it must be a bool: whether alpha is divided by the square root of the rank",
                "pass True or False",
            )
        dicts = "patterns are a dict from names of modules to numbers"
        for name in ("rank_pattern", "alpha_pattern"):
            given = getattr(self, name)
            _require(isinstance(given, Mapping), f"{name} = {shown(given)}", dicts)
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            whole = isinstance(rank, Integral) and not isinstance(rank, bool)
            allowed = f"a rank is an int, 1 to {_MOST_RANK}"
            _require(whole and 1 <= rank <= _MOST_RANK, f"{name} = {shown(rank)}", allowed)
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            allowed = "an alpha is a number above 0"
            _require(0 < as_float(alpha) < 1e9, f"{name} = {shown(alpha)}", allowed)
        _require(
            0 <= as_float(self.dropout) < 1,
            f"dropout = {shown(self.dropout)}",
            "it must be a probability, at least 0 and below 1",
        )
        targets = self.targets if isinstance(self.targets, str) else _names(self.targets)
        if isinstance(targets, str):
            require_pattern(targets, last_parts=False)
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            require_pattern(pattern, last_parts=True)
        return LoraOptions(
            int(self.rank),
            _plain(self.alpha),
            float(self.dropout),
            targets,
            {name: int(rank) for name, rank in self.rank_pattern.items()},
            {name: _plain(alpha) for name, alpha in self.alpha_pattern.items()},
            bool(self.use_rslora),
            *self._checked_layers(),
        )

    def _checked_layers(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """Return the layers with adapters and the names before their numbers, or raise."""
        given: Any = self.layers_to_transform
        numbers = (given,) if isinstance(given, Integral) else given
        counts = isinstance(numbers, list | tuple | None) and all(
            isinstance(each, Integral) and not isinstance(each, bool) and int(each) >= 0
            for each in numbers or ()
        )
        found = f"layers_to_transform = {shown(given)}"
        _require(counts, found, "it is a layer's number, or a list of them, from 0 on")
        if numbers and isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise error(
                ValueError,
                f"{found} with the targets {shown(self.targets)}",
                "layers are chosen for a list of targets",
                "pass a list of names, or choose layers by the regular expression",
            )
        kind: Any = self.layers_pattern
        names = (kind,) if isinstance(kind, str) else kind
        if not isinstance(names, list | tuple) or not all(
            isinstance(each, str) and _A_NAME.fullmatch(each) for each in names
        ):
            raise error(
                NotImplementedError,
                f"layers_pattern = {shown(kind)}",
                "there is code for names, such as layers, before the number of a layer",
                "pass names without a regular expression",
            )
        return tuple(int(each) for each in numbers) if numbers else None, tuple(names)

    def targeted(self, module: str) -> bool:
        """Tell whether a module, by its full name, has an adapter."""
        if self.targets == ALL_LINEAR:
            return self._in_layers(module)
        if isinstance(self.targets, str):
            return matcher((self.targets,), last_parts=False).matches(self.targets, module)
        if module in self.targets:  # in full: in whatever layer it is
            return True
        chosen = any(_ends_with(module, name) for name in self.targets)
        return chosen and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        """Tell whether a module is in one of the layers that have adapters."""
        if self.layers_to_transform is None:
            return True
        parts = module.split(".")
        numbers = [
            int(parts[i])
            for i in range(2, len(parts) - 1)
            if parts[i].isdecimal()
            and (not self.layers_pattern or parts[i - 1] in self.layers_pattern)
        ]
        return bool(numbers) and numbers[-1] in self.layers_to_transform

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return self._matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), self._matching(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def idle(self, modules: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the modules that have adapters."""
        names, patterns = list(modules), (*self.rank_pattern, *self.alpha_pattern)
        matches = matcher(patterns, last_parts=True).matches
        return [each for each in patterns if not any(matches(each, name) for name in names)]

    def _matching(self, patterns: Mapping[str, object], module: str, default: object) -> Any:
        """Return the value of the first pattern that a module's last parts match."""
        matches = matcher((*self.rank_pattern, *self.alpha_pattern), last_parts=True).matches
        found = (value for pattern, value in patterns.items() if matches(pattern, module))
        return next(found, default)

    def effective(self, modules: Iterable[str]) -> LoraOptions:
        """Return the options without idle patterns."""
        idle = self.idle(modules)
        return self._replace(
            rank_pattern={p: rank for p, rank in self.rank_pattern.items() if p not in idle},
            alpha_pattern={p: alpha for p, alpha in self.alpha_pattern.items() if p not in idle},
        )

    def fitting(self, modules: Iterable[str]) -> LoraOptions:
        """Return the options for these linear layers alone, without names and patterns of others.

        PEFT loads adapters whose targets name modules that a model lacks.
        """
        names = list(modules)
        options = self.effective(filter(self.targeted, names))
        if isinstance(self.targets, str):
            return options
        known = [each for each in self.targets if any(_ends_with(name, each) for name in names)]
        return options._replace(targets=tuple(known) or self.targets)

    def require_found(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the targets that are none of these linear layers.

        Raises ValueError if no target is one of them, or a pattern matches none of them.
        """
        names = list(modules)
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        lacking: tuple[str, ...] = ()
        if not isinstance(self.targets, str):
            found = {each for each in targets if any(_ends_with(name, each) for name in names)}
            lacking = tuple(each for each in targets if each not in found)
        if not any(map(self.targeted, names)):
            unknown = lacking or targets
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
            layers = self.layers_to_transform
            where = "" if layers is None else f" in the layers {', '.join(map(str, layers))}"
            passed = ", ".join(map(shown, unknown)) or "()"
            raise error(
                ValueError,
                f"targets {passed} name no module of this model{where}",
                f"its linear layers are {', '.join(kinds)}; the head and the embedding have no "
                "adapters that are trained",
                "name some of these, or pass targets='all-linear'",
            )
        if idle := self.idle(filter(self.targeted, names)):
            raise error(
                ValueError,
                f"the pattern {shown(idle[0])} matches no module that has an adapter",
                "a pattern is of the last parts of a module's name, such as q_proj",
                "leave it out, or add what it matches to the targets",
            )
        return lacking


def _names(targets: object) -> str | tuple[str, ...]:
    names = sorted(targets) if isinstance(targets, set | frozenset) else targets
    names = tuple(names) if isinstance(names, list | tuple) else (None,)
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    if ALL_LINEAR in names:
        raise error(
            ValueError,
            f"targets = {shown(targets)}",
            f"{ALL_LINEAR!r} is all linear layers, and stands alone",
            "leave it out, or all other names",
        )
    if not all(isinstance(name, str) for name in names):
        raise error(
            TypeError,
            f"targets = {shown(targets)}",
            "targets must be 'all-linear', a list of names, or a regular expression of whole names",
            "pass for example ['q_proj', 'v_proj']",
        )
    return names


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _plain(alpha: object) -> float:
    """Return an alpha as PEFT writes most: 32, and not 32.0."""
    number = as_float(alpha)
    return int(number) if number == int(number) else number


def _require(holds: bool, passed: str, allowed: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, "pass for example rank=16, alpha=32")
