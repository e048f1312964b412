"""The recipe's generator, whose cache is paged, against the same model without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.devices import EMULATED, KERNELS, NUMPY
from support.readme import recipes
from support.search import Search

import cupyattn
from cupyattn import PagedKVCache, Scheduler

REQUESTS, NEW_TOKENS = (32, 12) if Search.deep else (12, 6)
FEW_BLOCKS = 30 if Search.deep else 12
WINDOW = (21, 0)


def recipe_names(library: str = "numpy") -> dict[str, Any]:
    """Run the recipe, and return its names."""
    names: dict[str, Any] = {}
    (recipe,) = (recipe for recipe in recipes() if "Scheduler(" in recipe)
    source = recipe.replace("import numpy as np", f"import {library} as np")
    exec(compile(source, "recipes.rst", "exec"), names)
    return names


def dense_logits(
    names: dict[str, Any], tokens: Sequence[int], dtype: Any = np.float32, **options: Any
) -> Any:
    """The logits after each token of the recipe's model, with dense attention."""
    H, G, D = (names[name] for name in "HGD")  # noqa: N806

    def on_host(array: Any) -> np.ndarray:
        return (array if isinstance(array, np.ndarray) else array.get()).astype(dtype)

    x = cupyattn.embedding(on_host(names["table"]), np.array(tokens))[None]
    rotary = [on_host(angles) for angles in names["rotary"]]
    for w in ({name: on_host(each) for name, each in of.items()} for of in names["layers"]):
        qkv = cupyattn.linear(cupyattn.rms_norm(x), w["qkv"])
        qkv = qkv.reshape(1, len(tokens), H + 2 * G, D)
        q, k = cupyattn.rope((qkv[:, :, :H], qkv[:, :, H : H + G]), *rotary)
        seen = cupyattn.attention(q, k, qkv[:, :, H + G :], causal=True, **options)
        y = cupyattn.linear(seen.reshape(1, len(tokens), H * D), w["mix"], residual=x)
        inner = cupyattn.linear(cupyattn.rms_norm(y), w["gate_up"], activation="swiglu")
        x = cupyattn.linear(inner, w["down"], residual=y)
    return cupyattn.linear(x[0], on_host(names["head"]))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return recipe_names()


class Windowed(PagedKVCache):
    """The recipe's model gets a sliding window."""

    def attend(self, layer, q, tables, /, **options):
        return super().attend(layer, q, tables, window_size=WINDOW, **options)


def generate(
    names: dict[str, Any],
    preempt: str = "recompute",
    num_blocks: int = 200,
    requests: int = REQUESTS,
    new_tokens: int = NEW_TOKENS,
    max_tokens: int = 96,
    samples: int = 1,
    side: Any = NUMPY,
    dtype: str = "float32",
    **window: Any,
) -> Any:
    """Run ragged requests, some sharing a prefix, one with samples; note every step's logits.

    Returns the scheduler, the cache, the requests, and of each sample its logits by length.
    """
    rng = np.random.default_rng(1)
    G, D, vocabulary = names["G"], names["D"], names["VOCABULARY"]  # noqa: N806
    cache = (Windowed if window else PagedKVCache)(
        names["LAYERS"], num_blocks, 16, G, D, dtype=dtype, xp=names["np"],
        prefix_caching=True, num_host_blocks=num_blocks,
    )  # fmt: skip
    scheduler = Scheduler(cache, max_batch=24, max_tokens=max_tokens, preempt=preempt, **window)
    logits: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    linear = names["linear"]
    seen: list[np.ndarray] = []

    def watching(x, w, *others, **options):
        out = linear(x, w, *others, **options)
        if w is names["head"]:
            seen[:] = [out]
        return out

    def forward(batch):
        drawn = names["forward"](batch)
        for row, work in zip(side.get(seen[0]), batch, strict=True):
            for sample in work.samples:
                of_sample = logits.setdefault((work.request.number, sample), {})
                of_sample[len(work.sequence)] = row
        return drawn

    shared = rng.integers(0, vocabulary, 50).tolist()
    submitted = []
    patches = {"cache": cache, "linear": watching}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patches.items():
            patch.setitem(names, name, value)
        for number in range(requests):
            own = rng.integers(0, vocabulary, int(rng.integers(1, 70))).tolist()
            prompt = shared[: 10 * (number % 6)] + own
            n = 2 if number == 3 else samples
            submitted.append(scheduler.submit(prompt, max_new_tokens=new_tokens, n=n))
        while not scheduler.idle:
            scheduler.step(forward)
    cache.allocator.check()
    assert cache.allocator.num_used == 0
    return scheduler, cache, submitted, logits


def worst_of(names, requests, logits, **window):
    """Return the largest distance of the logits from those of float64, paged and dense in float32.

    The tokens have to be those that these logits choose, one after the other. "differing" counts
    those that the dense model does not choose.
    """
    worst = {"paged": 0.0, "dense": 0.0, "differing": 0}
    for (number, sample), found in logits.items():
        request = requests[number]
        tokens = [*request.tokens, *request.outputs[sample]]
        assert sorted(found) == list(range(len(request.tokens), len(tokens)))
        exact = dense_logits(names, tokens[:-1], np.float64, **window)
        dense = dense_logits(names, tokens[:-1], **window)
        for length, row in found.items():
            worst["paged"] = max(worst["paged"], np.abs(row - exact[length - 1]).max())
            assert tokens[length] == row.argmax()
            worst["differing"] += int(tokens[length] != dense[length - 1].argmax())
        worst["dense"] = max(worst["dense"], np.abs(dense - exact).max())
    return worst


@pytest.mark.parametrize(
    ("preempt", "num_blocks"), [("recompute", 200), ("recompute", FEW_BLOCKS), ("swap", FEW_BLOCKS)]
)
def test_ragged_sequences_are_dense_attention_step_by_step(names, preempt, num_blocks):
    """The error is that of the dense model in float32, and the tokens are the same."""
    scheduler, cache, requests, logits = generate(names, preempt, num_blocks)
    assert (scheduler.num_preempted > 0) == (num_blocks == FEW_BLOCKS)
    assert cache.statistics().prefix_hit_rate > 0.2
    assert len(logits) == sum(request.n for request in requests) == REQUESTS + 1
    worst = worst_of(names, requests, logits)
    assert worst["paged"] <= 2 * worst["dense"] < 1e-4
    assert not worst["differing"]


def test_caches_of_integers_generate_too(names):
    """Each format is further from the float64 model than the last, and as near as its bits are."""
    worst = {}
    for dtype in ("float32", "int8", "int4"):
        _, _, requests, logits = generate(names, num_blocks=FEW_BLOCKS, dtype=dtype)
        worst[dtype] = worst_of(names, requests, logits)["paged"]
    assert worst["float32"] < 1e-4 < worst["int8"] < 0.1 < worst["int4"] < 1.5


class FaultError(Exception):
    """An error that a copy or the model raises at times."""


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_steps_that_fail_lose_nothing(names, preempt, monkeypatch):
    """Copies and the model fail before, after and within their work; the tokens are the same."""
    rng = np.random.default_rng(4)
    faults = []

    def failing(work, share):
        def call(*arguments, **options):
            for when in range(2):
                if rng.random() < share:
                    faults.append(work.__name__)
                    raise FaultError
                if not when:
                    result = work(*arguments, **options)
            return result

        return call

    for name in ("copy", "copy_to_host", "copy_from_host"):
        monkeypatch.setattr(PagedKVCache, name, failing(getattr(PagedKVCache, name), 0.3))
    monkeypatch.setattr(PagedKVCache, "attend", failing(PagedKVCache.attend, 0.02))
    step = Scheduler.step

    def until_it_runs(self, forward):
        while True:
            try:
                return step(self, forward)
            except FaultError:
                self._allocator.check()

    monkeypatch.setattr(Scheduler, "step", until_it_runs)
    _, _, requests, logits = generate(names, preempt, num_blocks=FEW_BLOCKS, samples=3)
    worst = worst_of(names, requests, logits)
    assert worst["paged"] <= 2 * worst["dense"] < 1e-4
    kinds = {"copy", "copy_to_host", "copy_from_host"} if preempt == "swap" else {"copy"}
    assert {*kinds, "attend"} <= set(faults)


@pytest.mark.deep
def test_the_kernels_generate_it_too(names):
    """The recipe as it is: on a GPU with CuPy's arrays, otherwise on the emulator."""
    on_gpu = KERNELS is not EMULATED
    names = recipe_names("cupy") if on_gpu else names
    size = {} if on_gpu else {"requests": 4, "new_tokens": 2}
    with KERNELS.running():
        _, _, requests, logits = generate(names, side=KERNELS, **size)
    worst = worst_of(names, requests, logits)
    assert worst["paged"] <= 16 * worst["dense"] < 1e-3


def test_a_window_gives_back_blocks_while_it_generates(names):
    """Sequences have more blocks than the pool; blocks that were given back are -1 in tables."""
    pool = 7 if Search.deep else 5
    window = {"window_size": WINDOW}
    _, _, requests, logits = generate(names, num_blocks=pool, max_tokens=40, **window)
    assert max(len(each.tokens) for each in requests) + NEW_TOKENS > pool * 16
    worst = worst_of(names, requests, logits, **window)
    assert worst["paged"] <= 2 * worst["dense"] < 1e-4
    assert worst_of(names, requests, logits)["paged"] > 1e-2, "without the window it is another"


def test_the_recipes_requests_are_those_of_the_dense_model(names):
    for request in names["requests"]:
        tokens = [*request.tokens, *request.outputs[0]]
        dense = dense_logits(names, tokens[:-1]).argmax(axis=-1)
        assert request.outputs[0] == dense[len(request.tokens) - 1 :].tolist()
