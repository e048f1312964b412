"""Generation through the paged cache: what a fresh full forward at each step chooses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.devices import everywhere, kernels_only
from support.fresh_forwards import NEW, WAYS, alone, expected, model_on, numpy_model, prompts_of
from support.search import mostly_deep

import cupyattn
from cupyattn.models import Generator
from cupyattn.models.generation.decoding import DecodeStep, Decoding

ARCHITECTURES = ("gpt2", "llama", "phi")


@pytest.mark.parametrize(
    ("name", "way"),
    mostly_deep(
        every := [*itertools.product((*ARCHITECTURES, "mistral", "qwen2"), WAYS)],
        [*(each for each in every if each[0] in ("llama", "mistral")), *every[::4]],
    ),
)
def test_every_token_is_that_of_a_fresh_forward(name, way):
    """A ragged batch is each prompt alone, whatever makes room and whoever waits."""
    generator = Generator(numpy_model(name), **{"num_blocks": 40, **WAYS[way]})
    assert generator.generate(prompts_of(name), max_new_tokens=NEW) == expected(name)
    if name != "mistral":  # whose window gives back blocks before they are wanted
        assert bool(generator.scheduler.num_preempted) == ("num_blocks" in WAYS[way])
    generator.cache.allocator.check()
    assert generator.cache.allocator.num_used == 0


@pytest.mark.nvrtc
@everywhere
@pytest.mark.parametrize("name", mostly_deep(ARCHITECTURES, ["llama"]))
def test_kernels_choose_the_same(name, side):
    """On the emulator, or on a GPU with its graphs, beside the same model's own full forward."""
    with side.running():
        model = model_on(getattr(side, "xp", np), name, max_positions=32)
        prompts = prompts_of(name, (2, 7))
        found = [alone(model, prompt, 3) for prompt in prompts]
        assert min(lead for _, lead in found) > 1e-4
        wanted = [tokens for tokens, _ in found]
        for captured in (False, True):
            assert model.generate(prompts, max_new_tokens=3, captured=captured) == wanted


@pytest.mark.nvrtc
@everywhere
@pytest.mark.parametrize("name", mostly_deep(ARCHITECTURES, ["llama"]))
def test_float16_chooses_what_its_rounding_leaves_open(name, side):
    """The largest logit of float32 wherever it leads by more than float16 errs in these texts."""
    prompts, twin = prompts_of(name, (2, 7)), model_on(np, name, max_positions=32)
    with side.running():
        model = model_on(getattr(side, "xp", np), name, "float16", max_positions=32)
        for captured in (False, True):
            leads, errors, behind = [], [], []
            for prompt, new in zip(
                prompts, model.generate(prompts, max_new_tokens=4, captured=captured), strict=True
            ):
                with cupyattn.backend("reference"):
                    exact = twin.logits([[*prompt, *new[:-1]]])[0]
                found = model.logits([[*prompt, *new[:-1]]])[0]
                found = np.asarray(found if model.xp is np else found.get(), np.float32)
                errors.append(np.abs(found - exact).max())
                drawn = exact[len(prompt) - 1 :]
                leads += np.diff(np.sort(drawn)[:, -2:]).ravel().tolist()
                behind += (drawn.max(axis=1) - drawn[np.arange(4), new]).tolist()
            allowed = 4 * max(errors)  # twice: of either token; twice: a step rounds elsewhere
            assert max(behind) <= allowed
            assert sum(lead > allowed for lead in leads) > len(leads) / 2


@pytest.mark.nvrtc
@kernels_only
def test_kernels_draw_the_same_captured_and_packed(side):
    """With every option in arrays, two samples of each prompt."""
    with side.running():
        model = model_on(side.xp, "llama", max_positions=32)
        options = {"max_new_tokens": 3, "temperature": 1.5, "top_p": 0.95, "n": 2, "seed": 4,
                   "repetition_penalty": 1.2}  # fmt: skip
        packed, captured = (
            model.generate(prompts_of("llama", (2, 7)), captured=captured, **options)
            for captured in (False, True)
        )
    assert packed == captured
    assert len({tuple(output) for outputs in packed for output in outputs}) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi", "mistral"])
def test_graphs_choose_what_a_fresh_forward_does(name, way):
    """CUDA graphs, whatever makes room; steps without graphs too."""
    import cupy

    model = model_on(cupy, name)
    found = [alone(model, prompt) for prompt in prompts_of(name)]
    assert min(lead for _, lead in found) > 1e-4
    for captured in (True, False):
        generator = Generator(model, **{"num_blocks": 40, **WAYS[way], "captured": captured})
        outputs = generator.generate(prompts_of(name), max_new_tokens=NEW)
        assert outputs == [tokens for tokens, _ in found]
        generator.cache.allocator.check()


@pytest.mark.gpu
def test_a_graph_keeps_its_memory_to_itself():
    """What others allocate and fill between replays is not what a step works in."""
    import cupy

    model = model_on(cupy, "llama")
    generator = Generator(model, num_blocks=40)
    generation = generator.submit([1, 2, 3], max_new_tokens=40)
    while not generator.idle:
        generator.step()
        for size in (256, 4096, 1 << 16, 1 << 20):
            cupy.full(size, np.nan, np.float32)
    assert generation.outputs[0] == alone(model, [1, 2, 3], 40)[0]


def test_what_looks_ahead_is_used():
    """Most steps are queued before the last one has been read, and none is computed twice."""
    queued = {"begin": 0, "go_on": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in queued:
            method = getattr(DecodeStep, name)

            def counted(self, *arguments, name=name, method=method):
                queued[name] += 1
                return method(self, *arguments)

            patch.setattr(DecodeStep, name, counted)
        generator = Generator(numpy_model("llama"), captured=True, block_size=32, num_blocks=8)
        (output,) = generator.generate([[1, 2, 3]], max_new_tokens=40)
    assert output == alone(numpy_model("llama"), [1, 2, 3], 40)[0]
    assert queued == {"begin": 2, "go_on": 37}, "the prompt gives one, a block begins at 32"


@pytest.mark.parametrize("way", ["plain", "captured", "captured, swap", "lookup"])
def test_prompts_come_and_go(way):
    """Every second step another one comes, and one that nobody waits for leaves."""
    generator = Generator(numpy_model("llama"), **{"num_blocks": 40, **WAYS[way]})
    waiting, submitted, steps = prompts_of("llama"), [], 0
    leaving = generator.submit([5, 4, 3], max_new_tokens=60)
    while waiting or not generator.idle:
        if waiting and steps % 2 == 0:
            submitted.append(generator.submit(waiting.pop(0), max_new_tokens=NEW))
        if steps == 7:
            generator.cancel(leaving)
        generator.step()
        steps += 1
        generator.cache.allocator.check()
    assert [generation.outputs[0] for generation in submitted] == expected("llama")
    assert 0 < len(leaving.outputs[0]) < 60
    assert leaving.finished


def cut(tokens, ends):
    """Tokens up to the first that ends a text."""
    return tokens[: next((at for at, token in enumerate(tokens, 1) if token in ends), len(tokens))]


@pytest.mark.parametrize("captured", [False, True])
def test_a_batch_changes_when_texts_end(captured):
    """What was queued for a batch is of no use for another."""
    wanted = expected("llama")
    ends = {wanted[1][4]}
    outputs = [cut(tokens, ends) for tokens in wanted]
    assert [len(tokens) for tokens in outputs] == [12, 5, 9, 12, 12]
    given = {"max_new_tokens": NEW, "stop": ends, "captured": captured}
    assert numpy_model("llama").generate(prompts_of("llama"), **given) == outputs


def forgets_to_compare(monkeypatch):
    monkeypatch.setattr("cupyattn.models.generation.decoding._state", lambda draws, more: [])


def goes_on_across_blocks(monkeypatch):
    monkeypatch.setattr(Decoding, "_may_go_on", lambda self, draws: True)


def keeps_its_tables(monkeypatch):
    monkeypatch.setattr("cupyattn.kv_cache.StepTables.advance", lambda self: None)


@pytest.mark.parametrize(
    "bug",
    [forgets_to_compare, goes_on_across_blocks, keeps_its_tables],
    ids=lambda bug: bug.__name__,
)
def test_planted_bugs_of_looking_ahead_are_found(bug, monkeypatch):
    bug(monkeypatch)

    def trial():
        test_every_token_is_that_of_a_fresh_forward("llama", "captured, swap")
        test_a_batch_changes_when_texts_end(captured=True)

    with pytest.raises((AssertionError, ValueError, IndexError)):
        trial()


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_that_fails_loses_nothing(captured, monkeypatch):
    model = numpy_model("llama")
    generator = Generator(model, num_blocks=5, captured=captured, lookup=2)
    submitted = [generator.submit(prompt, max_new_tokens=NEW) for prompt in prompts_of("llama")]
    rng, failed = np.random.default_rng(0), 0
    head = model.head

    def failing(hidden):
        if rng.random() < 0.2:
            raise FloatingPointError
        return head(hidden)

    monkeypatch.setattr(model, "head", failing)
    while not generator.idle:
        try:
            generator.step()
        except FloatingPointError:
            failed += 1
            generator.cache.allocator.check()
    assert failed > 3
    assert [generation.outputs[0] for generation in submitted] == expected("llama")


@pytest.mark.parametrize("cache_dtype", ["int8", "int4", "float32"])
def test_caches_of_integers_generate(cache_dtype):
    model, prompts = numpy_model("llama"), prompts_of("llama")
    generator = Generator(model, num_blocks=20, cache_dtype=cache_dtype)
    found = generator.generate(prompts, max_new_tokens=NEW)
    assert generator.cache.dtype == cache_dtype
    assert [len(output) for output in found] == [NEW] * len(prompts)
    assert (found == expected("llama")) or cache_dtype != "float32"
