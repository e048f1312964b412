"""What generation refuses: it says what was passed, what is allowed and how to fix it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models import Generator


@cache
def model():
    return models.random(TINY["gpt2"], dtype="float32", xp=np)


REFUSED = {
    "no tokens": ({"prompts": [[]]}, ValueError, "has no tokens"),
    "nothing": ({"prompts": []}, ValueError, "has no tokens"),
    "an id too large": ({"prompts": [[1], [2, 61]]}, ValueError, "token id 61 .* 0 to 60"),
    "an id below 0": ({"prompts": [-1]}, ValueError, "token id -1"),
    "no ids": ({"prompts": [[1.5]]}, TypeError, "prompt .* token ids"),
    "a number": ({"prompts": 3}, TypeError, "prompts = 3"),
    "text without a tokenizer": ({"prompts": "Hello"}, ValueError, "'Hello', .* no tokenizer"),
    "a string without one": ({"stop": "\n"}, ValueError, "has no tokenizer"),
    "too long": ({"prompts": [[1] * 20], "max_new_tokens": 6}, ValueError,
                 "20 tokens and max_new_tokens = 6; the model has 24 positions; .* at most 5"),
    "longer than the positions": (
        {"prompts": [[1] * 25]}, ValueError,
        "got a prompt of 25 tokens; the model has 24 positions; pass a shorter prompt",
    ),
    "a block beyond all": (
        {"block_size": 2**40}, ValueError, "block_size = 1099511627776; allowed is 16 to"
    ),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens = 0"),
    "half a token": ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens = 1.5"),
    "a negative temperature": ({"temperature": -1}, ValueError, "temperature = -1"),
    "no temperature": ({"temperature": None}, TypeError, "temperature = None"),
    "NaN": ({"temperature": float("nan")}, ValueError, "temperature = nan"),
    "top_k of 0": ({"top_k": 0}, ValueError, "top_k = 0"),
    "top_p of 0": ({"top_p": 0.0}, ValueError, "top_p = 0"),
    "top_p over 1": ({"top_p": 1.5}, ValueError, "top_p = 1.5"),
    "min_p over 1": ({"min_p": 2}, ValueError, "min_p = 2"),
    "no penalty": ({"repetition_penalty": 0}, ValueError, "repetition_penalty = 0"),
    "a negative seed": ({"seed": -1}, ValueError, "seed = -1"),
    "a large seed": ({"seed": 1 << 63}, ValueError, "seeds are 0 to"),
    "an empty stop": ({"stop": ["a", ""]}, ValueError, "empty string in stop"),
    "a stop that is none": ({"stop": [1.5]}, TypeError, "1.5 in stop"),
    "no samples": ({"n": 0}, ValueError, "n = 0"),
    "more samples than fit": ({"n": 10**9}, ValueError, "n = 1000000000; allowed is 1 to 65,536"),
    "a batch beyond all": ({"max_batch": 10**12}, ValueError, "max_batch = .* 1 to 65,536"),
    "one length": ({"lengths": 5}, TypeError, "lengths = 5"),
    "a length that is none": ({"lengths": [1.5]}, TypeError, "lengths = 1.5"),
    "a lookup below 0": ({"lookup": -1}, ValueError, "lookup = -1"),
    "a small cache": ({"prompts": [[1] * 20], "num_blocks": 1}, ValueError, "the cache has 1"),
    "a batch too small": ({"n": 3, "max_batch": 2}, ValueError, "n = 3"),
    "a cache's dtype": ({"cache_dtype": "int2"}, TypeError, "int2"),
    "another float dtype": ({"cache_dtype": "float16"}, TypeError, "kept as the model is"),
    "a temperature beyond float32": ({"temperature": 1e300}, ValueError, "temperature"),
    "a number beyond float64": ({"temperature": 10**400}, TypeError, "temperature"),
    "a top_p that float32 has not": ({"top_p": 1e-60}, ValueError, "top_p"),
    "a penalty that float32 has not": ({"repetition_penalty": 1e-60}, ValueError, "penalty"),
    "bytes as stop": ({"stop": b"x"}, TypeError, "decode it first"),
    "bytes": ({"prompts": b"abc"}, TypeError, "decode it"),
    "a way to make room": ({"preempt": "drop"}, ValueError, "preempt = 'drop'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case):
    changed, kind, says = REFUSED[case]
    given = {"prompts": [[1, 2, 3]], "max_new_tokens": 2, **changed}
    with pytest.raises(kind, match=says):
        model().generate(given.pop("prompts"), **given)


def test_a_prompt_that_is_far_too_long_is_refused_by_its_length():
    class Prompt(list):
        def __len__(self) -> int:
            return 10**7

        def __iter__(self):
            return map(pytest.fail, ["its tokens are read"])

    with pytest.raises(ValueError, match="got a prompt of 10000000 tokens; the model has 24 pos"):
        model().generate([Prompt([1])], max_new_tokens=1)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="'top_q'"):
        model().generate([1], max_new_tokens=2, top_q=0.5)


def test_a_stream_is_refused_when_it_is_called():
    with pytest.raises(ValueError, match="token id 99"):
        model().stream([99], max_new_tokens=2)
    with pytest.raises(ValueError, match="2 prompts"):
        model().stream([[1], [2]], max_new_tokens=2)


def test_a_stream_is_of_one_sample():
    generator = Generator(model(), num_blocks=4)
    with pytest.raises(ValueError, match="n = 2; a stream is of one sample"):
        generator.stream([1], max_new_tokens=2, n=2)
    assert generator.idle


def test_a_stream_that_nobody_reads_asks_for_nothing():
    generator = Generator(model(), num_blocks=4)
    stream = generator.stream([1], max_new_tokens=2)
    assert not generator.idle
    del stream
    assert generator.idle


def test_more_tokens_than_there_are_may_be_left_to_draw_from():
    drawn = [
        model().generate([1], max_new_tokens=4, seed=3, temperature=1.0, top_k=top_k)
        for top_k in (2**40, None)
    ]
    assert drawn[0] == drawn[1]


def test_ids_do_not_wrap():
    """2**32 + 3 is no 3, and 2**64 - 1 no -1."""
    for ids in ([[2**32 + 3]], np.array([[2**64 - 1]], np.uint64)):
        with pytest.raises(ValueError, match="id"):
            model().logits(ids)
    assert model().logits(np.zeros((1, 0), np.int64)).shape == (1, 0, model().config.vocab_size)


def test_the_last_position_is_used():
    (output,) = model().generate([[1] * 20], max_new_tokens=5)
    assert len(output) == 5


def test_nothing_is_submitted_of_prompts_that_are_refused():
    """A prompt that has no room comes behind one that has."""
    generator = Generator(model(), num_blocks=1)
    with pytest.raises(ValueError, match="the cache has 1"):
        generator.generate([[1, 2], [1] * 20], max_new_tokens=2)
    assert generator.idle
    generator.cache.allocator.check()
    assert len(generator.generate([[1, 2]], max_new_tokens=2)[0]) == 2


def test_logits_that_are_no_numbers_are_an_error():
    weights = model().weights
    broken = weights._replace(norm=weights.norm._replace(weight=weights.norm.weight * np.nan))
    nan = models.Model(model().config, broken, "float32", np)
    for captured in (False, True):
        with pytest.raises(FloatingPointError, match="all NaN"):
            nan.generate([1, 2], max_new_tokens=3, captured=captured)
