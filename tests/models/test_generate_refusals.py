"""Refusals of generation, and its parts: room for the cache, lookup, graphs, streams of text."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import examples
from support.tiny_models import TINY, ByteTokenizer

from cupyattn import PagedKVCache, models
from cupyattn.models import Generator
from cupyattn.models.config import ELEMENTWISE, GATED
from cupyattn.models.forward import FUNCTIONS, SecondStream
from cupyattn.models.generation import generator as room
from cupyattn.models.generation import steps as graph
from cupyattn.models.generation.continuations import LONGEST_MATCH, accepted, draft
from cupyattn.models.generation.text import INCOMPLETE, TextStream


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
        {"block_size": 2**40}, ValueError, "block_size = 1099511627776; .* integer, 16 to"
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
    "a large seed": ({"seed": 1 << 63}, ValueError, "integer, 0 to 9,223"),
    "an empty stop": ({"stop": ["a", ""]}, ValueError, "empty string in stop"),
    "a stop that is none": ({"stop": [1.5]}, TypeError, "1.5 in stop"),
    "no samples": ({"n": 0}, ValueError, "n = 0"),
    "more samples than fit": ({"n": 10**9}, ValueError, "n = 1000000000; .* 1 to 65,536"),
    "a batch beyond all": ({"max_batch": 10**12}, ValueError, "max_batch = .* 1 to 65,536"),
    "one length": ({"lengths": 5}, TypeError, "lengths = 5"),
    "a length that is none": ({"lengths": [1.5]}, TypeError, "lengths = 1.5"),
    "a lookup below 0": ({"lookup": -1}, ValueError, "lookup = -1"),
    "a small cache": ({"prompts": [[1] * 20], "num_blocks": 1}, ValueError, "the cache has 1"),
    "a batch too small": ({"n": 3, "max_batch": 2}, ValueError, "n = 3"),
    "a cache's dtype": ({"cache_dtype": "int2"}, TypeError, "int2"),
    "another float dtype": ({"cache_dtype": "float16"}, TypeError, "in the model's dtype"),
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


def test_bad_streams_and_options_are_refused_at_the_call():
    generator = Generator(model(), num_blocks=4)
    with pytest.raises(TypeError, match="'top_q'"):
        model().generate([1], max_new_tokens=2, top_q=0.5)
    with pytest.raises(ValueError, match="token id 99"):
        model().stream([99], max_new_tokens=2)
    with pytest.raises(ValueError, match="2 prompts"):
        model().stream([[1], [2]], max_new_tokens=2)
    with pytest.raises(ValueError, match="n = 2; a stream has only one sample"):
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
    """The second prompt has no room in the cache."""
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


@pytest.fixture(scope="module")
def llama():
    return models.random(TINY["llama"]._replace(max_positions=96), dtype="float32", xp=np, seed=3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int8", "int4", np.float16])
def test_a_block_is_as_large_as_the_cache_makes_it(llama, dtype):
    config = llama.config
    cache = PagedKVCache(
        config.num_layers, 3, 32, config.num_kv_heads, config.head_dim, dtype=dtype, xp=np
    )
    assert room.block_bytes(config, dtype, 32) * 3 == cache.nbytes


def test_by_default_there_is_room_for_what_runs(llama):
    """There is room for the longest prompts that can run at once."""
    generator = Generator(llama, lengths=[10, 40, 33, 7], max_batch=2)
    assert generator.cache.allocator.num_blocks == 3 + 3
    assert Generator(llama, max_batch=3).cache.allocator.num_blocks == 3 * 6
    assert Generator(llama, lengths=[15], lookup=2).cache.allocator.num_blocks == 2


def test_a_request_gets_no_more_than_the_memory_holds(llama, monkeypatch):
    """Sequences without room wait, and the tokens are the same."""
    prompts = [[number] * 20 for number in range(4)]
    wanted = llama.generate(prompts, max_new_tokens=20)
    of_block = room.block_bytes(llama.config, "float32", 16)
    caches = []
    init = Generator.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        caches.append(self.cache.allocator.num_blocks)

    monkeypatch.setattr(Generator, "__init__", noted)
    for blocks, got in ((100, 12), (3, 3)):
        free = int(blocks * of_block / room.SHARE) + of_block // 2
        monkeypatch.setattr(room, "free_bytes", lambda xp, free=free: free)
        assert llama.generate(prompts, max_new_tokens=20) == wanted
        assert caches.pop() == got
    monkeypatch.setattr(room, "free_bytes", lambda xp: 2 * of_block)
    with pytest.raises(MemoryError, match=r"of 40 tokens needs 3 blocks .* holds 1"):
        llama.generate(prompts, max_new_tokens=20)


def test_the_host_tells_its_free_memory():
    assert room.free_bytes(np) > 1 << 20


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=40), count=st.integers(0, 5)
)
@examples(80)
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


class Noting:
    """A context manager and a bag of methods, whose names go into a list."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def __enter__(self):
        self.notes.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.notes.append(f"leave {self.name}")

    def __getattr__(self, method):
        def call(*_, **__):
            self.notes.append(f"{self.name}.{method}")
            return SimpleNamespace(launch=lambda: self.notes.append("launch"))

        return call


@pytest.fixture
def notes():
    return []


@pytest.fixture
def xp(notes):
    def pool():
        return SimpleNamespace(malloc="the pool's malloc")

    def using(malloc):
        assert malloc == "the pool's malloc"
        return Noting("pool", notes)

    cuda = SimpleNamespace(
        get_current_stream=lambda: Noting("current", notes),
        Stream=lambda non_blocking: Noting("stream", notes),
        MemoryPool=pool,
        using_allocator=using,
    )
    return SimpleNamespace(__name__="cupy", cuda=cuda)


def test_work_is_captured_after_two_runs(xp, notes):
    replay = graph.capture(xp, lambda: notes.append("prepare"), lambda: notes.append("work"))
    assert notes == [
        "current.synchronize", "enter stream", "enter pool", "prepare", "work", "prepare", "work",
        "stream.synchronize", "stream.begin_capture", "work", "stream.end_capture",
        "leave pool", "leave stream",
    ]  # fmt: skip
    notes.clear()
    replay()
    assert notes == ["launch"]


def test_a_second_stream_waits_at_both_ends(xp, notes):
    second = SecondStream(xp)
    for _ in range(2):  # on the same stream
        with second:
            notes.append("within")
        notes.append("meanwhile")
        second.join()
    once = [
        "current.record", "stream.wait_event", "enter stream", "within", "leave stream",
        "meanwhile", "stream.record", "current.wait_event",
    ]  # fmt: skip
    assert notes == 2 * once


def test_activations_of_their_own_are_those_of_a_parallel_layer():
    assert tuple(FUNCTIONS) == (*ELEMENTWISE, *GATED)


def test_a_capture_that_fails_is_ended(xp, notes):
    """And the error is the work's own."""

    def work():
        notes.append("work")
        if notes.count("work") == 3:
            raise FloatingPointError("the work's own")

    with pytest.raises(FloatingPointError, match="the work's own"):
        graph.capture(xp, lambda: None, work)
    assert notes[-4:] == ["work", "stream.end_capture", "leave pool", "leave stream"]


def test_two_copies_are_on_their_way_at_most(monkeypatch, notes):
    """Each has its own memory and its own event."""
    events = []

    class Event:
        def __init__(self, disable_timing):
            self.number = len(events)
            events.append(self)

        def record(self, stream):
            notes.append((stream, "record", self.number))

        def synchronize(self):
            notes.append(("wait", self.number))

    class Drawn:
        def __init__(self, *values):
            self.values = values

        def get(self, *, out, stream, blocking):
            assert not blocking
            out[:] = self.values

    memory = []

    def pinned(size):
        memory.append(bytearray(size))
        return memory[-1]

    monkeypatch.setattr(graph, "_current_stream", lambda: "stream")
    cuda = SimpleNamespace(alloc_pinned_memory=pinned, Event=Event)
    readback = graph.Readback(SimpleNamespace(__name__="cupy", cuda=cuda), 3)
    first, second = readback.queue(Drawn(1, 2, 3)), readback.queue(Drawn(4, 5, 6))
    assert notes == [("stream", "record", 0), ("stream", "record", 1)]
    assert (first(), second()) == ([1, 2, 3], [4, 5, 6])
    assert notes[2:] == [("wait", 0), ("wait", 1)]
    assert readback.queue(Drawn(7, 8, 9))() == [7, 8, 9]
    assert [len(each) for each in memory] == [12, 12]


def test_numpy_arrays_need_none_of_it():
    calls = []
    graph.capture(np, lambda: calls.append("prepare"), lambda: calls.append("work"))()
    assert calls == ["work"]
    array = np.arange(3, dtype=np.int32)
    read = graph.Readback(np, 3).queue(array)
    array += 1
    assert read() == [0, 1, 2]


TEXTS = st.text(st.sampled_from("ab\nüé€𝄞 "), max_size=30)


def streamed(text: bytes, prompt: bytes = b"", stop=()):
    stream = TextStream(ByteTokenizer(), prompt, stop)
    pieces = [stream.push(token) for token in text]
    return [*pieces, stream.finish()], stream


@given(text=TEXTS, prompt=TEXTS)
@examples(50)
def test_pieces_are_whole_characters_and_make_the_text(text, prompt):
    pieces, stream = streamed(text.encode(), prompt.encode())
    assert "".join(pieces) == stream.text == text
    assert not any(INCOMPLETE in piece for piece in pieces)
    assert [len(piece) for piece in pieces if piece] == [1] * len(text), "as soon as it is whole"


@given(text=TEXTS, cut=st.integers(0, 90))
@examples(50)
def test_a_prompt_may_end_within_a_character(text, cut):
    """As one of ids may: the character belongs to what follows."""
    whole = text.encode()
    before = whole[:cut].decode(errors="ignore")
    pieces, stream = streamed(whole[cut:], whole[:cut])
    assert "".join(pieces) == stream.text == text[len(before) :]


@given(text=TEXTS, stop=st.lists(st.text(st.sampled_from("ab\nü€"), min_size=1, max_size=3)))
@examples(80)
def test_the_first_string_ends_it(text, stop):
    pieces, stream = streamed(text.encode(), stop=stop)
    found = [at for at in map(text.find, stop) if at >= 0]
    # What ends first, byte by byte: of two strings one may begin earlier and end later.
    for end in range(len(text) + 1):
        begun = [at for at in (text[:end].find(each) for each in stop) if at >= 0]
        if begun:
            assert "".join(pieces) == text[: min(begun)]
            break
    else:
        assert "".join(pieces) == text
    assert stream.stopped
    assert bool(found) == ("".join(pieces) != text)


@given(st.binary(max_size=40))
@examples(40)
def test_bytes_that_are_no_characters_come_as_a_decoder_writes_them(data):
    pieces, _ = streamed(data)
    assert "".join(pieces) == ByteTokenizer().decode(data)


def test_no_text_follows_the_end():
    stream = TextStream(ByteTokenizer(), b"", ["."])
    assert [stream.push(token) for token in b"ab.c"] == ["a", "b", "", ""]
    assert stream.finish() == ""
    assert stream.text == "ab"


class Spaced:
    """Tokens are words, and decoding drops the space of the first, as SentencePiece's does."""

    def encode(self, text):
        raise NotImplementedError

    def decode(self, ids):
        return "".join(f" {number}" for number in ids)[1:]


def test_spaces_between_tokens_are_kept():
    stream = TextStream(Spaced(), [1, 2])
    assert [stream.push(token) for token in (3, 4)] == [" 3", " 4"]
    long = TextStream(Spaced(), range(100))
    assert "".join(long.push(token) for token in range(20)) == "".join(f" {i}" for i in range(20))
