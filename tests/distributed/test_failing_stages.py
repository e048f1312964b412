"""A rank that fails in any of its transfers or kernels: all end at once, and it is named."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.search import deep

from cupyattn.distributed import (
    Group,
    RankFailedError,
    ring_attention,
    ring_attention_backward,
    run,
)
from cupyattn.distributed.calls import Calls
from cupyattn.distributed.communicators.mailbox import ThreadCommunicator

X = np.random.default_rng(0).standard_normal((1, 16, 2, 8))
SINKS = np.zeros(2)
STAGES: dict[str, tuple[Any, Any]] = {
    "send": (ThreadCommunicator, lambda communicator: communicator.rank),
    "receive": (ThreadCommunicator, lambda communicator: communicator.rank),
    "all_gather": (ThreadCommunicator, lambda communicator: communicator.rank),
    "forward": (Calls, lambda calls: calls._plan.rank),
    "backward": (Calls, lambda calls: calls._plan.rank),
}
"""What fails, and whose it is."""


def both(group: Group) -> None:
    given: dict[str, Any] = {"group": group, "causal": True, "sinks": SINKS}
    out, lse = ring_attention(X, X, X, return_lse=True, **given)
    ring_attention_backward(X, X, X, X, out, lse, **given)


class Planted:
    """Has one rank fail when it does something for the n-th time."""

    def __init__(self, stage: str, culprit: int, time: int, patch: pytest.MonkeyPatch) -> None:
        owner, rank_of = STAGES[stage]
        right, self.made = getattr(owner, stage), 0

        def fails(its: Any, *given: Any, **options: Any) -> Any:
            if rank_of(its) == culprit:
                self.made += 1
                if self.made == time:
                    raise MemoryError("planted")
            return right(its, *given, **options)

        patch.setattr(owner, stage, fails)


@pytest.mark.parametrize("ranks", [3, *deep(2, 5)])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_each_time(stage, ranks):
    for culprit in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            often = Planted(stage, culprit, 0, patch)
            run(both, ranks)
        assert often.made >= 2
        for number in range(1, often.made + 1):
            begun = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                Planted(stage, culprit, number, patch)
                with pytest.raises(RankFailedError) as raised:
                    run(both, ranks)
            assert str(raised.value) == f"rank {culprit} failed: MemoryError: planted"
            assert time.monotonic() - begun < 60  # ranks wait for 300
