"""Generation with options: a seed replays alone as in any batch, and samples share a prompt."""

from __future__ import annotations

import numpy as np
import pytest
from support.fresh_forwards import NEW, WAYS, expected, numpy_model, prompts_of

from cupyattn.models import Generator


@pytest.mark.parametrize("captured", [False, True])
def test_samples_share_the_prompts_blocks(captured):
    """Until they write: then each has a block of its own, and all of them may differ."""
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
    "options", [DRAWN, {**DRAWN, "repetition_penalty": 1.5}, {"temperature": 1}]
)
def test_a_seed_replays_whatever_runs_beside_it(options):
    """In any batch, with preemption or without, captured or not."""
    model, prompts = numpy_model("phi"), prompts_of("phi")
    wanted = [
        model.generate([prompt], max_new_tokens=NEW, seed=11, **options)[0] for prompt in prompts
    ]
    assert wanted != expected("phi")
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
    for chosen in ([0, 1, 2, 3, 4], [0, 1], range(7)):
        submitted = [
            generator.submit([7, number], max_new_tokens=NEW, **options[number])
            for number in chosen
        ]
        while not generator.idle:
            generator.step()
        for number, generation in zip(chosen, submitted, strict=True):
            given = {"max_new_tokens": NEW, **options[number]}
            assert model.generate([7, number], **given) == [generation.outputs[0]]


def test_a_penalty_weakens_what_stands_there():
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
