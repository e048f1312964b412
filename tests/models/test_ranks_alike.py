"""Ranks that hold a model together and do not call alike: an error on each of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.distributed import Group, RankFailedError, run
from cupyattn.models import parallel
from cupyattn.models.transformer import Model

CHECKPOINTS = Path(__file__).parent / "checkpoints"
WHOLE = models.random(TINY["llama"], dtype="float32", xp=np)


def share(group: Group) -> Model:
    config, weights = parallel.split(WHOLE.config, WHOLE.weights, group, np)
    return Model(config, weights, WHOLE.dtype, np, lambda: None, group)


def load(group: Group, name: str = "llama3", **options: Any) -> Model:
    return models.load(CHECKPOINTS / name, xp=np, group=group, **{"dtype": "float32", **options})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"name": "gpt2"}, {"name": "llama3"}], "architecture = "),
        ([{"dtype": "float16"}, {"dtype": "float32"}], "dtype = "),
        ([{"quantize": "int8"}, {}], "quantize = "),
    ],
)
def test_another_model_is_an_error_before_it_is_read(given, says, monkeypatch):
    monkeypatch.setattr("cupyattn.models.loading.filled", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(RankFailedError, match=rf"ValueError: rank . called with {says}.*, rank . "):
        run(lambda group: load(group, **given[group.rank]), 2, timeout=20)


@pytest.mark.parametrize("group", [3, "g", object()])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match=r"got group = .*; it is a cupyattn.distributed.Group"):
        load(group)


def test_the_model_is_where_its_rank_is():
    """On NumPy ranks, as if their communicators had devices."""

    def of_rank(group: Group, xp: Any) -> None:
        group.device = group.rank
        parallel.require_group(group, xp)

    with pytest.raises(RankFailedError, match=r"xp=numpy on a rank of device .; .*; leave xp out"):
        run(lambda group: of_rank(group, np), 2, timeout=20)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=1)))
    with pytest.raises(RankFailedError, match=r"device 1 is the current .* of device 0;"):
        run(lambda group: of_rank(group, cupy), 2, timeout=20)


GREEDY: dict[str, Any] = {"prompts": [1, 2, 3], "max_new_tokens": 4}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3}


@pytest.mark.parametrize(
    ("both", "name", "values"),
    [
        (GREEDY, "prompts", ([1, 2, 3], [4, 5, 6])),
        (GREEDY, "prompts", ([1, 2, 3], [[1, 2, 3], [1]])),
        (GREEDY, "prompts", ([[1] * 30 + [2]], [[1] * 30 + [3]])),
        (GREEDY, "max_new_tokens", (4, 5)),
        (GREEDY, "stop", ((), 7)),
        (DRAWN, "seed", (3, 4)),
        (DRAWN, "seed", (3, None)),
        (DRAWN, "temperature", (1.0, 2.0)),
        (DRAWN, "top_k", (3, None)),
        (DRAWN, "n", (1, 2)),
        (GREEDY, "num_blocks", (40, None)),
        (GREEDY, "block_size", (16, 32)),
        (GREEDY, "lookup", (0, 2)),
        (GREEDY, "max_tokens", (32, 64)),
    ],
)
def test_a_generation_that_differs_is_an_error(both, name, values):
    with pytest.raises(RankFailedError, match=rf"ValueError: rank . called with (.*, )?{name} = "):
        run(
            lambda group: share(group).generate(**{**both, name: values[group.rank]}), 2, timeout=20
        )


def test_each_prompt_draws_from_a_seed_of_its_own():
    options = {"max_new_tokens": 12, "temperature": 5.0}
    first, second = run(lambda group: share(group).generate([[1, 2]] * 2, **options), 2, timeout=20)
    assert first == second
    assert first[0] != first[1]
