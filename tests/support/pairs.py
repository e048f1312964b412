"""Few combinations of several lists in which any two values of different lists meet.

A bug of a specialisation mostly needs one or two of its macros. Of head dims, dtypes, option sets
and loads, a dozen combinations have every two where there are a hundred of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from support.search import Search

from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.tables import pairs


def attention_kernels(
    head_dims: Sequence[Any],
    dtypes: Sequence[str],
    option_sets: Sequence[Any],
    views: Sequence[str],
    option_views: Sequence[str],
) -> list[tuple[Any, ...]]:
    """Which specialisations a search draws from: one of each list, of views all of one load.

    A GPU, and a search of as many examples as were asked for, go through all combinations.
    """
    loads = _groups(views, "sliced"), _groups(option_views, "padded")
    combine = itertools.product if device_count() or Search.examples else pairs
    return list(combine(head_dims, dtypes, option_sets, *loads))


def _groups(views: Sequence[str], other: str) -> list[tuple[str, ...]]:
    """The views but one, and that one, which needs another load: those that there are."""
    groups = (tuple(v for v in views if (v == other) == is_other) for is_other in (False, True))
    return [group for group in groups if group]
