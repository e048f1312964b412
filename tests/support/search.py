"""How far the suite searches: as a plain run does, with ``--deep``, or as ``--examples`` says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from cupyattn.runtime.device.cuda import device_count

DEEPER = 2
"""How many times the examples of a plain run ``--deep`` tries, where a test does not say."""

# How long a run of everything takes on two free cores, kernels compiled anew; by what is asked.
DURATIONS = {
    "quick": "about a minute",
    "plain": "4 to 8 minutes",
    "deep": "30 to 40 minutes",
}

# What is marked quick: files and tests by how their names begin, but for those of the second list.
QUICK = (
    "attention/test_every_check",
    "attention/test_gradients",
    "attention/test_kernels.py::test_padding_hidden_by_a_large_finite_bias[float16",
    "attention/test_launch",
    "attention/test_options",
    "attention/test_window_edges.py::test_backward_in_float32[(24, 40)-70-(10, None)",
    "attention/test_window_edges.py::test_forward[flash-float16-64",
    "cli/test_arguments",
    "emulator/",
    "runtime/",
    "project/",
    "ops/test_errors",
    "ops/test_configs",
    "ops/test_views",
    "ops/test_results",
    "ops/test_what_to_pass",
    "ops/test_bounds",
    "autodiff/",
    "kv_cache/test_allocator",
    "cache/test_moves_refusals",
    "attention/test_paged_refusals",
    "kv_cache/test_paged_cache",
    "kv_cache/test_scheduler",
    "kv_cache/test_step_tables",
    "ops/test_launches",
    "ops/test_reference",
    "softmax/test_kernels.py::test_rows_without",
)
NOT_QUICK = (
    "emulator/test_budget",
    "runtime/test_compile",
    "runtime/test_folders",
    "runtime/test_fork.py::test_child_imports",
    "runtime/test_no_mma",
    "project/test_packaging",
    "ops/test_results",
    "project/test_suite",
    "runtime/test_two_gpus",
    "kv_cache/test_paged_cache.py::test_the_kernels",
    "kv_cache/test_step_tables.py::test_both_calls",
    "kv_cache/test_step_tables.py::test_rows_behind",
    "autodiff/test_vjp.py::test_options_get_their_gradients",
    "autodiff/test_vjp_functions.py::test_functions_that_make_one_call_of_kernels",
)

_Test = TypeVar("_Test", bound=Callable[..., Any])
_Value = TypeVar("_Value")


def add_options(parser: pytest.Parser) -> None:
    """Add the options of pytest's command line."""
    group = parser.getgroup("cupyattn")
    group.addoption(
        "--deep",
        action="store_true",
        help="search longer: more examples of every property, and the tests marked deep",
    )
    group.addoption(
        "--examples",
        type=int,
        metavar="N",
        help="try N examples of every property, instead of as many as each test says",
    )


class Search:
    """The kind of search; set before the first test is imported."""

    deep = False
    examples: int | None = None


def begin(config: pytest.Config, *, reproducible: bool) -> None:
    """Note what was asked for. A first example compiles kernels, so none has a deadline."""
    Search.deep = config.getoption("--deep")
    Search.examples = config.getoption("--examples")
    settings.register_profile(
        "suite",
        deadline=None,
        derandomize=reproducible,
        print_blob=True,
        max_examples=Search.examples or (100 if Search.deep else 25),
    )
    settings.load_profile("suite")


def examples(number: int, deep: int | None = None) -> Callable[[_Test], _Test]:
    """Limit hypothesis to a number of examples, of ``--deep`` to more: `DEEPER` times as many.

    For tests that run kernels: the emulator takes milliseconds where a GPU takes microseconds,
    so a GPU tries as many as of a property of NumPy.
    """
    if device_count() or Search.examples:
        return lambda test: test
    return settings(max_examples=(deep or number * DEEPER) if Search.deep else number)


def wider(plain: Iterable[_Value], deep: Iterable[_Value]) -> tuple[_Value, ...]:
    """Values to draw from: with ``--deep`` the second ones too.

    Each head dim, dtype or set of options is a kernel to compile, which takes the emulator longer
    than to run it.
    """
    return (*plain, *deep) if Search.deep else tuple(plain)


def deep(*values: Any) -> list[Any]:
    """Parameters of a test for ``--deep`` alone; several arguments of it as tuples."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep)
        for value in values
    ]


def mostly_deep(values: Iterable[Any], plain: Collection[Any]) -> list[Any]:
    """Parameters as of `deep`, but for those in `plain`, which every run has."""
    values = list(values)
    assert all(value in values for value in plain), plain
    return [value if value in plain else deep(value)[0] for value in values]


def is_quick(test: str) -> bool:
    """Tell whether a test, named by its path in tests, gives a first answer soon."""
    return test.startswith(QUICK) and not test.startswith(NOT_QUICK)


def duration(config: pytest.Config) -> str | None:
    """Return the limit of this run's time, if it is of the whole suite without a GPU."""
    if not whole_suite(config) or device_count() or Search.examples:
        return None
    asked = "quick" if config.getoption("-m") == "quick" else "deep" if Search.deep else "plain"
    return DURATIONS[asked]


def whole_suite(config: pytest.Config) -> bool:
    """Tell whether no file was named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS
