"""Options of adapters: the modules that have one, their ranks and their scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.training.counts import as_float
from cupyattn.models.training.module_patterns import matcher, require_pattern
from cupyattn.runtime.errors import error, shown

ALL_LINEAR = "all-linear"
_MOST_RANK = 1 << 16


class LoraOptions(NamedTuple):
    """The options of `LoraAdapters`, named there, as PEFT understands them."""

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float] = {}
    use_rslora: bool = False

    def checked(self) -> LoraOptions:
        """Return them in Python's own numbers, the targets as a tuple or a string.

        Raises
        ------
        TypeError, ValueError
            For numbers out of range, patterns that are none, and targets of another kind.
        """
        if not isinstance(self.use_rslora, bool | np.bool_):
            raise error(
                TypeError,
                f"use_rslora = {shown(self.use_rslora)}",
                "alpha is divided by the square root of the rank, or by the rank",
                "pass True or False",
            )
        for name in ("rank_pattern", "alpha_pattern"):
            given = getattr(self, name)
            _require(isinstance(given, Mapping), f"{name} = {shown(given)}", "patterns are a dict "
                     "from names of modules to numbers")  # fmt: skip
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            whole = isinstance(rank, Integral) and not isinstance(rank, bool)
            _require(whole and 1 <= rank <= _MOST_RANK, f"{name} = {shown(rank)}", "a rank is an "
                     f"int, 1 to {_MOST_RANK}")  # fmt: skip
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            _require(0 < as_float(alpha) < 1e9, f"{name} = {shown(alpha)}", "an alpha "
                     "is a number above 0")  # fmt: skip
        _require(
            0 <= as_float(self.dropout) < 1,
            f"dropout = {shown(self.dropout)}",
            "it is the probability of dropping an input, at least 0 and below 1",
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
        )

    def targeted(self, module: str) -> bool:
        """Tell whether a module, by its full name, has an adapter."""
        if isinstance(self.targets, str):
            if self.targets == ALL_LINEAR:
                return True
            return matcher((self.targets,), last_parts=False).matches(self.targets, module)
        return any(_ends_with(module, name) for name in self.targets)

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

    def _matching(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        """Return the value of the first pattern that a module's last parts match."""
        matches = matcher((*self.rank_pattern, *self.alpha_pattern), last_parts=True).matches
        found = (value for pattern, value in patterns.items() if matches(pattern, module))
        return next(found, default)

    def effective(self, modules: Iterable[str]) -> LoraOptions:
        """Return them without idle patterns."""
        idle = self.idle(modules)
        return self._replace(
            rank_pattern={p: rank for p, rank in self.rank_pattern.items() if p not in idle},
            alpha_pattern={p: alpha for p, alpha in self.alpha_pattern.items() if p not in idle},
        )

    def require_found(self, modules: Iterable[str]) -> None:
        """Raise ValueError for targets and patterns that no module of the model has.

        `modules` has the names of its linear layers.
        """
        names = list(modules)
        if isinstance(self.targets, str):
            unknown = [] if any(map(self.targeted, names)) else [self.targets]
        else:
            unknown = [
                target
                for target in self.targets
                if not any(_ends_with(name, target) for name in names)
            ]
        if unknown or not self.targets:
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise error(
                ValueError,
                f"targets {', '.join(map(shown, unknown)) or '()'} name no module of this model",
                f"its linear layers are {', '.join(kinds)}; the head and the embedding have no "
                "adapters",
                "name some of these, or pass targets='all-linear'",
            )
        if idle := self.idle(filter(self.targeted, names)):
            raise error(
                ValueError,
                f"the pattern {shown(idle[0])} matches no module that has an adapter",
                "a pattern is of the last parts of a module's name, such as q_proj",
                "leave it out, or add what it matches to the targets",
            )


def _names(targets: Any) -> str | tuple[str, ...]:
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
            "they are 'all-linear', a list of names, or a regular expression of whole names",
            "pass for example ['q_proj', 'v_proj']",
        )
    return names


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _plain(alpha: Any) -> float:
    """Return an alpha as PEFT writes most: 32, and not 32.0."""
    number = as_float(alpha)
    return int(number) if number == int(number) else number


def _require(holds: bool, passed: str, allowed: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, "pass such a one, for example rank=16, alpha=32")
