"""How large a cache is by default, and what prompt lookup finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import examples
from support.tiny_models import TINY

from cupyattn import PagedKVCache, models
from cupyattn.models import Generator
from cupyattn.models.generation import room
from cupyattn.models.generation.lookup import LONGEST_MATCH, accepted, draft


@pytest.fixture(scope="module")
def model():
    return models.random(TINY["llama"]._replace(max_positions=96), dtype="float32", xp=np, seed=3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int8", "int4", np.float16])
def test_a_block_is_as_large_as_the_cache_makes_it(model, dtype):
    config = model.config
    cache = PagedKVCache(
        config.num_layers, 3, 32, config.num_kv_heads, config.head_dim, dtype=dtype, xp=np
    )
    assert room.block_bytes(config, dtype, 32) * 3 == cache.nbytes


def test_by_default_there_is_room_for_what_runs(model):
    """Of many prompts as many as run at once, the longest ones."""
    generator = Generator(model, lengths=[10, 40, 33, 7], max_batch=2)
    assert generator.cache.allocator.num_blocks == 3 + 3
    assert Generator(model, max_batch=3).cache.allocator.num_blocks == 3 * 6
    assert Generator(model, lengths=[15], lookup=2).cache.allocator.num_blocks == 2


def test_a_request_gets_no_more_than_the_memory_holds(model, monkeypatch):
    """What has no room waits, and the tokens are the same."""
    prompts = [[number] * 20 for number in range(4)]
    wanted = model.generate(prompts, max_new_tokens=20)
    of_block = room.block_bytes(model.config, "float32", 16)
    caches = []
    init = Generator.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        caches.append(self.cache.allocator.num_blocks)

    monkeypatch.setattr(Generator, "__init__", noted)
    for blocks, got in ((100, 12), (5, 5), (3, 3)):
        free = int(blocks * of_block / room.SHARE) + of_block // 2
        monkeypatch.setattr(room, "free_bytes", lambda xp, free=free: free)
        assert model.generate(prompts, max_new_tokens=20) == wanted
        assert caches.pop() == got
    monkeypatch.setattr(room, "free_bytes", lambda xp: 2 * of_block)
    with pytest.raises(MemoryError, match=r"of 40 tokens needs 3 blocks .* holds 1"):
        model.generate(prompts, max_new_tokens=20)


def test_the_host_tells_its_free_memory():
    assert room.free_bytes(np) > 1 << 20


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=40), count=st.integers(0, 5)
)
@examples(200)
def test_a_draft_is_what_followed_the_longest_match(tokens, count):
    expected = []
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        last = tokens[-size:]
        starts = [at for at in range(len(tokens) - size) if tokens[at : at + size] == last]
        if starts:
            expected = tokens[starts[-1] + size :][:count]
            break
    assert draft(tokens, count) == expected


def test_tokens_of_which_bytes_agree_are_no_match():
    """The bytes of 256 and 0 contain those of 1, from the second on."""
    assert draft([256, 0, 1], 2) == []
    assert draft([1, 9, 256, 0, 1], 1) == [9]


@pytest.mark.parametrize(
    ("drafted", "chosen", "kept"),
    [
        ([], [4], [4]),
        ([4, 5], [4, 5, 6], [4, 5, 6]),
        ([4, 5], [4, 7, 6], [4, 7]),
        ([4, 5], [7, 5, 6], [7]),
    ],
)
def test_the_models_own_choice_is_kept(drafted, chosen, kept):
    assert accepted(drafted, chosen) == kept


def test_lookup_takes_fewer_steps_where_text_repeats():
    """A model that says one token again and again, of which drafts are right."""
    model = models.random(TINY["gpt2"]._replace(max_positions=96), dtype="float32", xp=np, seed=3)
    steps = {}
    for lookup in (0, 3):
        generator = Generator(model, num_blocks=8, lookup=lookup)
        generation = generator.submit([5, 6], max_new_tokens=40)
        steps[lookup] = 0
        while not generator.idle:
            generator.step()
            steps[lookup] += 1
        assert generation.results == model.generate([[5, 6]], max_new_tokens=40)
    assert len(set(generation.outputs[0][20:])) < 4, "it repeats itself"
    assert steps[0] == 40
    assert steps[3] < 30
