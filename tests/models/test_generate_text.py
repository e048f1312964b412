"""Generation of text: what ends it, and streams that yield it as it comes."""

from __future__ import annotations

import gc
from functools import cache

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.fresh_forwards import NEW, expected, numpy_model, prompts_of, tiny

from cupyattn import models
from cupyattn.kv_cache.pool import Pool
from cupyattn.models import Generator


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
    told = f"more than {positions} tokens; the model has {positions} positions; pass a shorter"
    with pytest.raises(ValueError, match=f"got a prompt of 10000000 characters, {told}"):
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
    """What only the garbage collector ends."""

    def __init__(self, stream) -> None:
        self.stream, self.itself = stream, self


@pytest.mark.parametrize("within", ["step", "submit", "cancel", "a block's taking", "nothing"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_is_collected_within_a_call_ends_behind_it(within, monkeypatch):
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
