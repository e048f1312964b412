"""Generation through the paged cache: a fresh full forward at each step chooses the same tokens."""

from __future__ import annotations

import gc
import itertools
from functools import cache

import numpy as np
import pytest
from support.devices import kernels_only
from support.search import deep, mostly_deep
from support.tiny_models import TINY, ByteTokenizer

import cupyattn
from cupyattn import models
from cupyattn.kv_cache.pool import Pool
from cupyattn.models import Generator
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.generation.steps import DecodeStep

NEW = 12


def tiny(name, **changes):
    return TINY[name]._replace(**{"max_positions": 96, **changes})


@cache
def numpy_model(name):
    return models.random(tiny(name), dtype="float32", xp=np, seed=3)


def placed(part, xp, dtype):
    """Copy weights to another library, whose random numbers differ."""
    if isinstance(part, tuple):
        parts = [placed(each, xp, dtype) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    return xp.asarray(part.astype(dtype)) if hasattr(part, "shape") else part


def model_on(xp, name, dtype="float32", **changes):
    config = tiny(name, **changes)
    weights = models.random(config, dtype="float32", xp=np, seed=3).weights
    return models.Model(config, placed(weights, xp, dtype), dtype, xp)


def prompts_of(name, lengths=(14, 7, 20, 33, 15)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, TINY[name].vocab_size, length).tolist() for length in lengths]


def alone(model, prompt, new=NEW):
    """Each token from a full forward over all before it, and its lead over the second."""
    tokens, leads = list(prompt), []
    for _ in range(new):
        logits = model.logits([tokens])[0, -1]
        on_host = np.asarray(logits if model.xp is np else logits.get(), np.float32)
        leads.append(np.diff(np.sort(on_host)[-2:]).item())
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], min(leads)


@cache
def expected(name):
    found = [alone(numpy_model(name), prompt) for prompt in prompts_of(name)]
    assert min(lead for _, lead in found) > 1e-5, "another seed: these are nearly equal"
    return [tokens for tokens, _ in found]


WAYS = {
    "plain": {},
    "captured": {"captured": True},
    "chunks of prompts": {"max_tokens": 32},
    "one at a time": {"max_batch": 1},
    "recompute": {"num_blocks": 5},
    "swap": {"num_blocks": 5, "preempt": "swap", "num_host_blocks": 9},
    "captured, recompute": {"captured": True, "num_blocks": 5},
    "captured, swap": {"captured": True, "num_blocks": 5, "preempt": "swap", "num_host_blocks": 9},
    "lookup": {"lookup": 3},
    "lookup, recompute": {"lookup": 3, "num_blocks": 5},
    "captured, lookup, recompute": {"captured": True, "lookup": 3, "num_blocks": 5},
}


ARCHITECTURES = ("gpt2", "llama", "phi")


@pytest.mark.parametrize(
    ("name", "way"),
    mostly_deep(
        every := [*itertools.product((*ARCHITECTURES, "mistral", "qwen2", "gemma4"), WAYS)],
        [
            *(("llama", way) for way in WAYS),
            *(("gpt2", "plain"), ("phi", "captured, recompute"), ("qwen2", "lookup")),
            *(("mistral", way) for way in ("recompute", "captured, swap")),
            ("gemma4", "swap"),
        ],
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


@pytest.mark.deep
@pytest.mark.nvrtc
@kernels_only
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_choose_what_the_full_forward_does(name, side):
    """On the emulator, or on a GPU with its graphs."""
    with side.running():
        model = model_on(side.xp, name, max_positions=32)
        prompts = prompts_of(name, (2, 7))
        found = [alone(model, prompt, 3) for prompt in prompts]
        assert min(lead for _, lead in found) > 1e-4
        wanted = [tokens for tokens, _ in found]
        for captured in (False, True):
            assert model.generate(prompts, max_new_tokens=3, captured=captured) == wanted


@pytest.mark.nvrtc
@kernels_only
def test_a_folder_with_heads_of_512_items_in_global_layers_generates(tmp_path, side):
    """A prompt, then a step for each token."""
    wide = {"global_kv_heads": 1, "global_head_dim": 512, "global_rotary_dim": 128}
    config = tiny("gemma4", num_layers=2, global_layers=(1,), num_heads=2, num_kv_heads=2, **wide)
    model = models.random(config, dtype="float32", xp=np, seed=3)
    folder = tmp_path / "model"
    write_folder(model.weights, model.config, None, folder)
    (prompt,) = prompts_of("llama", (20,))
    wanted, lead = alone(models.load(folder, dtype="float32", xp=np), prompt, 3)
    assert lead > 0.05, "another seed: float16 may choose otherwise"
    with side.running():
        model = models.load(folder, dtype="float16", xp=side.xp)
        assert model.generate([prompt], max_new_tokens=3) == [wanted]


@pytest.mark.nvrtc
@kernels_only
@pytest.mark.parametrize("name", mostly_deep((*ARCHITECTURES, "gemma4"), ["llama"]))
def test_float16_chooses_what_its_rounding_leaves_open(name, side):
    """The largest logit of float32 wherever it leads by more than float16 errs in these texts."""
    prompts, twin = prompts_of(name, (2, 7)), model_on(np, name, max_positions=32)
    with side.running():
        model = model_on(side.xp, name, "float16", max_positions=32)
        for captured in (False, True):
            leads, errors, losses = [], [], []
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
                losses += (drawn.max(axis=1) - drawn[np.arange(4), new]).tolist()
            allowed = 4 * max(errors)  # twice: of either token; twice: a step rounds elsewhere
            assert max(losses) <= allowed
            assert sum(lead > allowed for lead in leads) > len(leads) / 2


@pytest.mark.deep
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
    """Memory that is allocated between replays is not that of a step."""
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


@pytest.mark.parametrize("way", ["plain", "captured, swap", *deep("captured", "lookup")])
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
    """A step that was queued for one batch is not used for another."""
    wanted = expected("llama")
    ends = {wanted[1][4]}
    outputs = [cut(tokens, ends) for tokens in wanted]
    assert [len(tokens) for tokens in outputs] == [12, 5, 9, 12, 12]
    given = {"max_new_tokens": NEW, "stop": ends, "captured": captured}
    assert numpy_model("llama").generate(prompts_of("llama"), **given) == outputs


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


@pytest.mark.parametrize("captured", [False, True])
def test_samples_share_the_prompts_blocks(captured):
    """Until they write: then each has its own block, and all of them may differ."""
    generator = Generator(numpy_model("gpt2"), num_blocks=40, captured=captured)
    prompt = prompts_of("gpt2", (20,))[0]
    generation = generator.submit(prompt, max_new_tokens=8, n=4, temperature=2.0, seed=5)
    most, blocks = 0, []
    while not generator.idle:
        generator.step()
        sequences = generator.cache.allocator.sequences
        most = max(most, generator.cache.allocator.num_used)
        blocks.append({sequence.block_ids[0] for sequence in sequences})
    assert most == 5, "one block of 16 for all, and one more for each"
    assert {len(each) for each in blocks[:-1]} == {1}
    assert len({tuple(output) for output in generation.outputs}) > 1
    for sample, output in enumerate(generation.outputs):
        alone_ = generator.generate([prompt], max_new_tokens=8, temperature=2.0, seed=5 + sample)
        assert alone_ == [output]


def test_prompts_that_begin_alike_are_computed_once():
    generator = Generator(numpy_model("llama"), num_blocks=20)
    system = prompts_of("llama", (40,))[0]
    first = generator.generate([[*system, 1]], max_new_tokens=2)
    tokens = []
    step = generator.scheduler.step

    def watched(forward):
        def counting(batch):
            tokens.append(sum(len(work.tokens) for work in batch))
            return forward(batch)

        return step(counting)

    generator.scheduler.step = watched
    assert generator.generate([[*system, 1]], max_new_tokens=2) == first
    assert tokens == [9, 1], "two blocks of 16 were found"


DRAWN = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(
    "options", [{**DRAWN, "repetition_penalty": 1.5}, *deep(DRAWN, {"temperature": 1})]
)
def test_a_seed_replays_in_any_batch(options):
    """In any batch, with preemption or without, captured or not."""
    model, prompts = numpy_model("phi"), prompts_of("phi")[:3]
    wanted = [
        model.generate([prompt], max_new_tokens=NEW, seed=11, **options)[0] for prompt in prompts
    ]
    assert wanted != expected("phi")[:3]
    for way in ("plain", "captured", "captured, swap", "recompute", "lookup"):
        given = {"max_new_tokens": NEW, "seed": 11, **options, **WAYS[way]}
        assert model.generate(prompts, **given) == wanted
    assert model.generate(prompts, **{**given, "seed": 12}) != wanted
    unseeded = [model.generate(prompts, max_new_tokens=NEW, temperature=3.0) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("captured", [False, True])
def test_each_prompt_has_its_own_options(captured):
    """In one batch: greedy, drawn from all, from a few, and with a penalty."""
    options = [
        {}, {"temperature": 1.5, "seed": 1}, {"temperature": 0.8, "seed": 2, "top_k": 3},
        {"temperature": 1.2, "seed": 3, "top_p": 0.5}, {"temperature": 2, "seed": 4, "min_p": 0.1},
        {"repetition_penalty": 2.0}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
    ]  # fmt: skip
    model = numpy_model("llama")
    generator = Generator(model, num_blocks=40, captured=captured)
    for chosen in ([0, 1], range(7)):
        submitted = [
            generator.submit([7, number], max_new_tokens=NEW, **options[number])
            for number in chosen
        ]
        while not generator.idle:
            generator.step()
        for number, generation in zip(chosen, submitted, strict=True):
            given = {"max_new_tokens": NEW, **options[number]}
            assert model.generate([7, number], **given) == [generation.outputs[0]]


def test_a_penalty_weakens_earlier_tokens():
    model = numpy_model("qwen2")
    (free,) = model.generate([[1, 2]], max_new_tokens=20)
    assert len(set(free)) < 10, "it repeats itself"
    for captured in (False, True):
        options = {"max_new_tokens": 20, "repetition_penalty": 1e6, "captured": captured}
        (output,) = model.generate([[1, 2]], **options)
        tokens = [1, 2]
        for token in output:
            logits = model.logits([tokens])[0, -1].astype(np.float64)
            seen = sorted(set(tokens))
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1e6, logits[seen] * 1e6)
            assert token == logits.argmax()
            tokens.append(token)


@cache
def bytes_model():
    """A model of bytes, whose text goes on and on."""
    model = models.random(tiny("llama", vocab_size=260), dtype="float32", xp=np, seed=3)
    model.tokenizer = ByteTokenizer(begin=256)
    return model


def test_tokens_that_end_a_text_end_it():
    """They are among the ids, and not in the text."""
    model = numpy_model("llama")
    prompt, tokens = prompts_of("llama")[2], expected("llama")[2]
    end = tokens[4]
    assert end not in tokens[:4]
    assert model.generate([prompt], max_new_tokens=NEW, stop=end) == [tokens[:5]]
    ending = models.Model(model.config._replace(eos_ids=(end,)), model.weights, "float32", np)
    assert ending.generate([prompt], max_new_tokens=NEW, lookup=4) == [tokens[:5]]


def test_texts_also_end_with_the_tokens_of_the_tokenizer():
    """The config may name another token; ids that are continued have the config's alone."""
    found = bytes_model()
    model = models.Model(found.config, found.weights, "float32", np)
    model.tokenizer = ByteTokenizer(begin=256)
    ids = model.tokenizer.encode("Once upon")
    (tokens,) = model.generate([ids], max_new_tokens=20)
    end = tokens[6]
    at = tokens.index(end)
    model.tokenizer.end_ids = (end, 10**6)
    assert end not in model.config.eos_ids
    text = model.tokenizer.decode(tokens[:at])
    assert model.generate("Once upon", max_new_tokens=20) == [text]
    assert "".join(model.stream("Once upon", max_new_tokens=20)) == text
    both = [models.Prompt(tuple(ids), is_text=True), models.Prompt(tuple(ids))]
    generator = Generator(model, num_blocks=20)
    assert generator.generate(both, max_new_tokens=20) == [text, tokens]


class Counting(ByteTokenizer):
    """Notes how many characters it was given."""

    def __init__(self) -> None:
        super().__init__(begin=256)
        self.given: list[int] = []

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        self.given.append(len(text))
        return super().encode(text, special_tokens=special_tokens)


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning():
    found = bytes_model()
    model = models.Model(found.config, found.weights, "float32", np)
    model.tokenizer, positions = Counting(), found.config.max_positions
    message = f"more than {positions} tokens; the model has {positions} positions; pass a shorter"
    with pytest.raises(ValueError, match=f"got a prompt of 10000000 characters, {message}"):
        model.generate("x" * 10**7, max_new_tokens=1)
    assert sum(model.tokenizer.given) == 64 * positions
    for length in (positions, 64 * positions):  # counted as a whole
        with pytest.raises(ValueError, match=f"got a prompt of {length + 1} tokens; "):
            model.generate("x" * length, max_new_tokens=1)


def test_text_is_continued_by_text():
    model = bytes_model()
    prompts = ["Once upon", "a", "über", [104, 105]]
    found = model.generate(prompts, max_new_tokens=20)
    ids = [*(model.tokenizer.encode(prompt) for prompt in prompts[:3]), prompts[3]]
    outputs = model.generate(ids, max_new_tokens=20)
    assert found == [*map(model.tokenizer.decode, outputs[:3]), outputs[3]]
    assert model.generate("a", max_new_tokens=20) == [found[1]]
    assert model.generate([104, 105], max_new_tokens=20) == [found[3]]
    assert model.generate(np.array([[104, 105]] * 2), max_new_tokens=20) == [found[3]] * 2


@pytest.mark.parametrize("lookup", [0, 3])
def test_strings_that_span_tokens_end_the_text(lookup):
    """The string is cut off; ids end with the token that completed it."""
    model = bytes_model()
    (text,) = model.generate("Once upon", max_new_tokens=30, temperature=0.7, seed=1)
    at = next(at for at in range(2, len(text)) if text[at : at + 3].isascii())
    stop = text[at : at + 3]
    assert text.index(stop) == at < len(text) - 3
    options = {"max_new_tokens": 30, "temperature": 0.7, "seed": 1, "lookup": lookup}
    assert model.generate("Once upon", stop=stop, **options) == [text[:at]]
    assert model.generate("Once upon", stop=["no such", stop], **options) == [text[:at]]
    assert "".join(model.stream("Once upon", stop=[stop], **options)) == text[:at]
    ids = model.tokenizer.encode("Once upon")
    (output,) = model.generate([ids], stop=stop, **options)
    assert model.tokenizer.decode(output).endswith(stop)
    generator = Generator(model, num_blocks=10)
    generation = generator.submit("Once upon", max_new_tokens=30, stop=stop, n=2, temperature=0.7,
                                  seed=1)  # fmt: skip
    while not generator.idle:
        generator.step()
    assert generation.results[0] == text[:at]
    assert generator.cache.allocator.num_used == 0


def test_a_stream_yields_as_it_goes():
    model = bytes_model()
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        step = Generator.step

        def counted(self):
            steps.append(None)
            return step(self)

        patch.setattr(Generator, "step", counted)
        pieces = model.stream([104, 105], max_new_tokens=6)
        came = [(piece, len(steps)) for piece in pieces]
    (output,) = model.generate([104, 105], max_new_tokens=6)
    assert came == [(token, count) for count, token in enumerate(output, 1)]
    text = "".join(model.stream("hi", max_new_tokens=25))
    assert [text] == model.generate("hi", max_new_tokens=25)


def test_two_streams_of_a_generator_run_together():
    model = numpy_model("gpt2")
    generator = Generator(model, num_blocks=20)
    first, second = prompts_of("gpt2")[1:3]
    streams = [generator.stream(prompt, max_new_tokens=NEW) for prompt in (first, second)]
    came = [[], []]
    for _ in range(NEW):
        for pieces, stream in zip(came, streams, strict=True):
            pieces.append(next(stream))
    assert came == expected("gpt2")[1:3]
    assert [list(stream) for stream in streams] == [[], []]


def test_a_stream_that_is_left_gives_back_its_blocks():
    generator = Generator(numpy_model("gpt2"), num_blocks=20, captured=True)
    stream = generator.stream([1, 2, 3], max_new_tokens=NEW)
    next(stream)
    assert generator.cache.allocator.num_used
    stream.close()
    assert generator.cache.allocator.num_used == 0
    assert generator.idle
    assert generator.generate(prompts_of("gpt2"), max_new_tokens=NEW) == expected("gpt2")


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self, stream) -> None:
        self.stream, self.itself = stream, self


@pytest.mark.parametrize("within", ["step", "submit", "cancel", "a block's taking", "nothing"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_is_collected_within_a_call_ends_after_it(within, monkeypatch):
    """Its cancellation would be refused there, or wait for a lock that the same thread holds."""
    generator = Generator(numpy_model("gpt2"), num_blocks=20)
    gc.collect()
    gc.disable()
    try:
        stream = generator.stream([1, 2, 3], max_new_tokens=NEW)
        next(stream)
        other = generator.submit([4, 5, 6], max_new_tokens=NEW)
        Cycle(stream)
        del stream
        collected = []

        def collecting(whole):
            def call(*arguments, **options):
                if not collected:
                    collected.append(gc.collect())
                return whole(*arguments, **options)

            return call

        owner, name = {
            "step": (generator, "_forward"),
            "submit": (generator.scheduler, "submit"),
            "cancel": (generator.scheduler, "cancel"),
            "a block's taking": (Pool, "take"),
            "nothing": (generator, "_forward"),
        }[within]
        if within == "nothing":
            gc.collect()
            assert generator.scheduler.num_running + generator.scheduler.num_waiting == 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, collecting(getattr(owner, name)))
            generator.submit([7], max_new_tokens=1)
            generator.cancel(generator.submit([8, 9], max_new_tokens=1))
            generator.step()
        assert collected
        assert generator.scheduler.num_running + generator.scheduler.num_waiting == 1
        while not generator.idle:
            generator.step()
        assert len(other.outputs[0]) == NEW
        assert generator.cache.allocator.num_used == 0
        generator.cache.allocator.check()
    finally:
        gc.enable()
