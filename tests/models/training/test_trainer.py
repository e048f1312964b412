"""The trainer: it learns, skips what overflows, adds batches up; its schedules and its data."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import everywhere
from support.tiny_models import TINY, ByteTokenizer
from support.training import Bigram, counting

from cupyattn import models
from cupyattn.models.tokenizer.text import Rendered
from cupyattn.models.training.batches import (
    IGNORED,
    Packing,
    Position,
    Sample,
    digest,
    packed,
    packs,
)
from cupyattn.models.training.data import Reader, split
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import (
    LEAST,
    MOST,
    MOST_SKIPPED,
    SCHEDULES,
    AdamWOptions,
    LossScale,
    Schedule,
)
from cupyattn.models.training.trainable import loss_of
from cupyattn.models.training.trainer import Trainer, seed_of

TOKENS = 11


def trainer(model=None, *, steps=60, lr=0.1, tokens=64, samples=80, **options):
    packing = Packing(counting(TOKENS, samples=samples), batch_tokens=tokens)
    schedule = Schedule("linear", lr, steps, warmup=min(3, steps - 1))
    return Trainer(model or Bigram(TOKENS), packing, schedule=schedule, **options)


def test_it_learns_to_count():
    model = Bigram(TOKENS)
    steps = list(trainer(model))
    assert [step.number for step in steps] == list(range(1, 61))
    assert steps[0].loss == pytest.approx(np.log(TOKENS), rel=0.05)
    assert steps[-1].loss < 0.15
    following = (model.arrays["table"] + model.arrays["bias"]).argmax(axis=1)
    assert following.tolist() == [(i + 1) % TOKENS for i in range(TOKENS)]
    assert model.updates == 60 and not any(step.skipped for step in steps)
    assert steps[1].lr == pytest.approx(0.05)


@everywhere
def test_the_same_wherever_arrays_are(side):
    """A step on the kernels is that of the reference, within float32."""
    model = Bigram(TOKENS, dropout=0.25, put=side.put)
    steps = [trainer(model, steps=2, accumulate=2).step()]
    with_numpy = [trainer(Bigram(TOKENS, dropout=0.25), steps=2, accumulate=2).step()]
    for found, right in zip(steps, with_numpy, strict=True):
        assert_allclose(found[1:6], right[1:6], rtol=1e-5)


def test_accumulated_batches_are_one():
    """Losses and gradients are means over the labels of the step, however it is cut."""
    samples = counting(TOKENS, samples=24)

    def losses(batch_tokens, accumulate):
        packing = Packing(samples, batch_tokens=batch_tokens)
        made = Trainer(
            Bigram(TOKENS), packing, schedule=Schedule("constant", 0.1, 4), accumulate=accumulate
        )
        return [(step.loss, step.grad_norm, step.tokens) for step in made]

    parts = Packing(samples, batch_tokens=16).batches(1)
    assert parts > 5
    assert_allclose(losses(16, parts), losses(10_000, 1), rtol=2e-4)


def test_a_step_that_overflows_changes_nothing():
    model = Bigram(TOKENS, half=True)
    made = trainer(model, steps=40, tokens=24, loss_scale=LossScale(2.0**24, good_steps=5))
    before = {name: array.copy() for name, array in model.arrays.items()}
    first = made.step()
    assert first.skipped and not np.isfinite(first.grad_norm) and np.isfinite(first.loss)
    for name, array in model.arrays.items():
        assert (array == before[name]).all()
    assert model.updates == 0 and made.optimizer.steps == 0
    steps = [first, *made]
    for one, other in pairwise(steps):
        if one.skipped:
            assert other.loss_scale == one.loss_scale / 2
    assert made.optimizer.steps == sum(not step.skipped for step in steps) > 20
    assert steps[-1].loss < steps[0].loss / 2
    scales = [step.loss_scale for step in steps if not step.skipped]
    assert len(set(scales)) > 1  # it was doubled again, and too much


def test_a_loss_scale_changes_no_result():
    """Powers of two: the very same losses."""
    plain = [step.loss for step in trainer(steps=8)]
    scaled = [step.loss for step in trainer(steps=8, loss_scale=LossScale(2.0**10))]
    assert_allclose(plain, scaled, rtol=1e-6)


def test_gradients_are_clipped():
    free = trainer(steps=1, optimizer=AdamWOptions(clip=None)).step()
    clipped = trainer(steps=1, optimizer=AdamWOptions(clip=free.grad_norm / 10))
    assert clipped.step().grad_norm == free.grad_norm
    m = clipped.optimizer.saved()["m"]
    assert np.linalg.norm(m) == pytest.approx(0.1 * free.grad_norm / 10, rel=1e-5)


def test_dropout_is_drawn_anew_each_step_and_batch():
    seeds = {seed_of(*numbers) for numbers in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0))}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    first, again = (
        [step.loss for step in trainer(Bigram(TOKENS, dropout=0.3), steps=5)] for _ in range(2)
    )
    other = [step.loss for step in trainer(Bigram(TOKENS, dropout=0.3), steps=5, seed=1)]
    assert first == again != other


def test_samples_are_parted_once():
    samples = counting(TOKENS, samples=20)
    learnt, held = split(samples, 0.25, seed=3)
    assert (len(learnt), len(held)) == (15, 5)
    assert {id(each) for each in (*learnt, *held)} == {id(each) for each in samples}
    assert [id(each) for each in split(samples, 0.25, seed=4)[1]] != [id(each) for each in held]
    assert split(samples[:1], 0.9, seed=0) == (samples[:1], [])
    with pytest.raises(ValueError, match="a fraction of 1"):
        split(samples, 1, 0)


def test_no_step_after_the_last_draws_a_batch():
    made = trainer(steps=3)
    list(made)
    position = made.packing.position
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step 4 of 3; a schedule has only rates for its own"):
            made.step()
    assert (made.number, made.packing.position) == (3, position)


@pytest.mark.parametrize(
    ("ids", "learnt", "kind", "message"),
    [
        ([1.5, 2], [True] * 2, TypeError, "ids of float64; a sample is a list of token ids"),
        ([True, False], [True] * 2, TypeError, "ids of bool"),
        (["1"], [True], TypeError, "ids of <U1"),
        ([1, 2, 3], [True], ValueError, r"ids of shape \(3,\) and learnt of shape \(1,\)"),
        ([1, 2], True, ValueError, r"learnt of shape \(\)"),
        ([[1, 2]], [[True, True]], ValueError, r"ids of shape \(1, 2\)"),
        ([2**40, 1], [True] * 2, ValueError, "ids from 1 to 1099511627776"),
        ([3, -1], [True] * 2, ValueError, "ids from -1 to 3"),
    ],
)
def test_what_is_no_sample(ids, learnt, kind, message):
    with pytest.raises(kind, match=message):
        Sample.of(ids, learnt)


def test_samples_of_any_integers():
    assert Sample.of(np.array([2, 3], np.uint64), [0, 1]).labels.tolist() == [3, -100]
    assert len(Sample.of([], []).ids) == 0


def test_bad_trainings():
    with pytest.raises(ValueError, match="no samples"):
        Packing([], batch_tokens=9)
    with pytest.raises(ValueError, match=r"a sample of 3 tokens in batches of 2; .*--batch-tokens"):
        Packing([Sample.of([1, 2, 3], [True] * 3)], batch_tokens=2)
    model = Bigram(TOKENS)
    model.arrays = {}
    with pytest.raises(ValueError, match="nothing is learnt"):
        trainer(model)


@pytest.mark.parametrize("kind", [LoraAdapters, FullWeights])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample.of([1, 67], [True] * 2), r"samples\[1\] has 67 among its ids; .* tokens 0 to 66; "),
        (Sample(np.array([-1, 5]), np.array([5, -100])), r"samples\[1\] has -1 among its ids"),
        (Sample(np.array([1, 2]), np.array([67, -100])), r"samples\[1\] has 67 among its labels"),
        (Sample.of([1] * 41, [True] * 41), r"samples\[1\] has 41 tokens; the model has 40 posi"),
    ],
)
def test_samples_are_those_of_the_model(kind, sample, message):
    """Before the first step, and also for samples that are held back."""
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    packing = Packing([Sample.of([3, 66], [True] * 2), sample], batch_tokens=99)
    with pytest.raises(ValueError, match=message):
        Trainer(kind(model), packing, schedule=Schedule("constant", 0.1, 2))
    with pytest.raises(ValueError, match=message):
        loss_of(model, packing.samples, batch_tokens=99)


def test_a_loss_that_is_not_finite_ends_it():
    model = Bigram(TOKENS)
    model.arrays["table"][:] = np.nan
    with pytest.raises(FloatingPointError, match="not finite, 1 steps in a row"):
        trainer(model).step()


def test_samples_without_labels_need_others_in_a_step():
    def made(*others):
        packing = Packing([Sample.of([3], [True]), *others], batch_tokens=64)
        return Trainer(Bigram(TOKENS), packing, schedule=Schedule("constant", 0.1, 2))

    assert all(np.isfinite(step.loss) for step in made(*counting(TOKENS, samples=3)))
    with pytest.raises(ValueError, match=r"step 1 has no labels; .*; leave out samples without"):
        made(Sample.of([3, 4], [False] * 2)).step()


@pytest.mark.parametrize("number", [-1, 1.5, "2", None, True])
def test_what_is_counted_is_an_integer(number):
    for name in ("accumulate", "seed"):
        with pytest.raises(
            (TypeError, ValueError), match=f"{name} = .*; it must be an integer, . or"
        ):
            trainer(Bigram(TOKENS), **{name: number})
    for name in ("batch_tokens", "seed"):
        with pytest.raises(
            (TypeError, ValueError), match=f"{name} = .*; it must be an integer, . or"
        ):
            Packing(counting(TOKENS, samples=3), **{"batch_tokens": 64, name: number})


@given(kind=st.sampled_from(SCHEDULES), steps=st.integers(1, 200), data=st.data())
def test_rates_rise_and_fall(kind, steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    schedule = Schedule.checked(kind, 3e-4, steps, warmup)
    rates = np.array([schedule.at(step) for step in range(1, steps + 1)])
    assert (rates > 0).all() and rates.max() == rates[warmup] == 3e-4
    assert (np.diff(rates[: warmup + 1]) > 0).all()
    falls = np.diff(rates[warmup:])
    assert (falls == 0).all() if kind == "constant" else (falls < 0).all()


@pytest.mark.parametrize("step", [0, -1, 5])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_there_are_rates_of_its_steps_alone(kind, step):
    """That of a cosine would rise again."""
    with pytest.raises(ValueError, match=f"step {step} of 4; .*; make a schedule of more steps"):
        Schedule(kind, 1.0, 4).at(step)


def test_rates_by_hand():
    cosine = Schedule.checked("cosine", 2.0, 5, 1)
    assert [cosine.at(step) for step in range(1, 6)] == pytest.approx(
        [1.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )


@pytest.mark.parametrize(
    ("given_", "kind", "message"),
    [
        (("linear", 1.0, 5.5, 0), TypeError, "steps = 5.5; it must be an integer, 1 or more; pass"),
        (("linear", 1.0, 5, 0.5), TypeError, "warmup = 0.5; it must be an integer, 0 or more"),
        (("linear", 1.0, None, 0), TypeError, "steps = None"),
        (("linear", 1.0, True, 0), TypeError, "steps = True"),
        (("linear", 1.0, 0, 0), ValueError, "steps = 0; it must be an integer, 1 or more"),
        (("linear", 1.0, 5, -1), ValueError, "warmup = -1; it must be an integer, 0 or more"),
        (([], 1.0, 5, 0), ValueError, r"schedule = \[\]"),
        (("steps", 1.0, 5, 0), ValueError, "'steps'; it must be one of 'constant', 'linear', 'cos"),
        (("linear", "1", 5, 0), ValueError, "lr = '1'; it is a positive number"),
        (("linear", 0.0, 5, 0), ValueError, "lr = 0.0; it is a positive number"),
        (("linear", float("nan"), 5, 0), ValueError, "lr = nan"),
        (("linear", 1e40, 5, 0), ValueError, r"lr = 1e\+40; it is a positive number up to 1e\+38"),
        (("linear", 1.0, 5, 5), ValueError, "warmup = 5 of 5 steps; the warm-up must be shorter"),
    ],
)
def test_bad_schedules(given_, kind, message):
    with pytest.raises(kind, match=message):
        Schedule.checked(*given_)


def test_the_scale_halves_and_doubles():
    scale = LossScale(8.0, good_steps=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, True, False, False):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 4, 2]
    copy = LossScale(good_steps=3)
    copy.restore(scale.state())
    assert copy == scale


@pytest.mark.parametrize(
    "given_",
    [{"scale": 0.0}, {"scale": float("inf")}, {"scale": "2"}, {"good_steps": 0}, {"skipped": -1}],
)
def test_bad_scales(given_):
    ((name, value),) = given_.items()
    with pytest.raises(ValueError, match=f"{name} = {value!r}; it (is|must be) "):
        LossScale(**given_)


def test_the_scale_has_limits():
    scale = LossScale(MOST, good_steps=1)
    scale.update(True)
    assert scale.scale == MOST
    for _ in range(MOST_SKIPPED - 1):
        scale.update(False)
    assert scale.scale == LEAST
    scale.update(True)
    for _ in range(MOST_SKIPPED - 1):
        scale.update(False)
    with pytest.raises(FloatingPointError, match=r"not finite, 40 steps in a row.* smaller lear"):
        scale.update(False)


def test_without_a_scale_nothing_helps():
    scale = LossScale.off()
    for _ in range(5000):
        scale.update(True)
    assert scale.scale == 1.0
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        scale.update(False)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    room=st.integers(40, 90),
    seed=st.integers(0, 5),
)
def test_each_sample_once_and_batches_full(lengths, room, seed):
    found = packs(lengths, room, np.random.default_rng(seed))
    assert sorted(i for pack in found for i in pack) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[i] for i in pack) for pack in found)
    assert sizes[-1] <= room
    # First fit: the emptiest two would have shared a batch.
    assert len(sizes) < 2 or sizes[0] + sizes[1] > room
    assert found == packs(lengths, room, np.random.default_rng(seed))


def test_windows_keep_long_samples_apart():
    """The longest of thousands of samples are not all in the same batches."""
    lengths = np.random.default_rng(0).integers(1, 100, 3000).tolist()
    found = packs(lengths, 200, np.random.default_rng(1))
    longest = [max(lengths[i] for i in pack) for pack in found]
    early, late = longest[: len(found) // 2], longest[len(found) // 2 :]
    assert abs(np.mean(early) - np.mean(late)) < 5
    assert sum(lengths) / (200 * len(found)) > 0.97


def test_batches_are_the_samples():
    samples = [Sample.of([4, 5, 6], [False, True, True]), Sample.of([7, 8], [True, False])]
    batch = packed(samples)
    assert_array_equal(batch.ids, [4, 5, 6, 7, 8])
    assert_array_equal(batch.labels, [5, 6, IGNORED, IGNORED, IGNORED])
    assert_array_equal(batch.positions, [0, 1, 2, 0, 1])
    assert_array_equal(batch.cu_seqlens, [0, 3, 5])
    assert batch.max_seqlen == 3
    assert {array.dtype for array in batch[:4]} == {np.dtype(np.int32)}
    assert [sample.num_labels for sample in samples] == [2, 0]


def test_epochs_differ_and_repeat():
    packing, again = (Packing(counting(9, samples=40), batch_tokens=30, seed=4) for _ in "ab")
    orders = [packing.epoch(number) for number in range(3)]
    assert orders[0] != orders[1] != orders[2]
    meeting = [{(i, j) for pack in order for i in pack for j in pack if i < j} for order in orders]
    assert len(meeting[0] & meeting[1]) < len(meeting[0]) / 2
    assert [again.epoch(number) for number in range(3)] == orders
    assert packing.batches(3) == sum(map(len, orders))
    assert Packing(packing.samples, batch_tokens=30, seed=5).epoch(0) != orders[0]


def test_it_goes_on_from_a_position():
    packing = Packing(counting(9, samples=20), batch_tokens=30)
    batches = [next(packing) for _ in range(2 * packing.batches(1))]
    for at in (0, 3, packing.batches(1) - 1, packing.batches(1)):
        again = Packing(packing.samples, batch_tokens=30)
        for _ in range(at):
            next(again)
        other = Packing(packing.samples, batch_tokens=30)
        other.position = Position(*again.position)
        assert_array_equal(next(other).ids, batches[at].ids)


def test_a_digest_knows_other_samples():
    samples = counting(9, samples=5)
    changed = [*samples[:-1], Sample(samples[-1].ids, samples[-1].labels * 0)]
    digests = {digest(given) for given in (samples, changed)}
    assert len(digests) == 2
    assert digest(counting(9, samples=5)) in digests


BEGIN, END = 256, 257


class ChatTokenizer(ByteTokenizer):
    """Its template writes U:...; and A:...; - and refuses roles it does not know."""

    def render_chat(self, messages, *, add_generation_prompt=False):
        if any(set(each) != {"role", "content"} for each in messages):
            raise ValueError("the chat template failed: a message has a role and a content")
        text = "".join(f"{each['role'][0].upper()}:{each['content']};" for each in messages)
        return Rendered(text + ("A:" if add_generation_prompt else ""), [])


class Forgetful(ChatTokenizer):
    """Drops what was thought before, as some templates do."""

    def render_chat(self, messages, *, add_generation_prompt=False):
        return super().render_chat(messages[-2:], add_generation_prompt=add_generation_prompt)


def reader(tokenizer=None, *, end=END, longest=100):
    return Reader(tokenizer or ChatTokenizer(BEGIN), end, longest)


def learnt(sample):
    """The tokens to be predicted, as text; # is the end."""
    ids = sample.labels[sample.labels != IGNORED].tolist()
    return "".join("#" if each == END else chr(each) for each in ids)


def test_a_text():
    (sample,) = reader().samples({"text": "abc"}, "here")
    assert sample.ids.tolist() == [BEGIN, *b"abc", END]
    assert sample.labels.tolist() == [*b"abc", END, IGNORED]


def test_a_prompt_carries_no_loss():
    given = {"prompt": "2+2=", "completion": "4!", "id": 7}
    (sample,) = reader().samples(given, "here")
    assert sample.ids.tolist() == [BEGIN, *b"2+2=4!", END]
    assert learnt(sample) == "4!#"
    # The prompt's last token predicts the completion's first.
    assert sample.labels[4] == ord("4") and (sample.labels[:4] == IGNORED).all()


def test_chats_learn_the_answers_alone():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "ok"},
    ]
    (sample,) = reader().samples({"messages": messages}, "here")
    assert bytes(sample.ids.tolist()) == b"U:hi;A:yo;U:?;A:ok;"  # the template begins and ends it
    assert learnt(sample) == "yo;ok;"


def test_long_texts_are_cut_and_prompts_are_not():
    samples = reader(longest=4, end=None).samples({"text": "abcdefg"}, "here")
    assert [learnt(sample) for sample in samples] == ["abc", "efg"]
    assert [len(sample.ids) for sample in samples] == [4, 4]
    (sample,) = reader(longest=4, end=None).samples({"text": "abcd"}, "here")  # one token is left
    assert len(sample.ids) == 4
    with pytest.raises(ValueError, match=r"line 3 has 10 tokens; a sample has at most 9, .*--max"):
        reader(longest=9).samples({"prompt": "abcdef", "completion": "gh"}, "line 3")


def test_a_file(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('\ufeff{"text": "a"}\n\n{"prompt": "b", "completion": "ü"}\r\n', "utf-8")
    samples = reader().read(file)
    assert [len(sample.ids) for sample in samples] == [3, 5]


MESSAGES = [{"role": "user", "content": "x"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "no JSON .Expecting value"),
        (b"[" * 100_000, "it is nested more than 64 deep"),
        (b'{"text": NaN}', "no JSON .NaN is no JSON"),
        (b"[1]", r"it is \[1\]"),
        (b"{}", "it has nothing; each line is"),
        (b'{"prompt": "a"}', "it has 'prompt'; each line is"),
        (
            b'{"text": "a", "prompt": "b", "completion": "c"}',
            "it has 'text', 'prompt', 'completion'; .* one of these forms alone",
        ),
        (b'{"prompt": "b", "completion": "c", "messages": []}', "'completion', 'messages'"),
        (b'{"text": ""}', "its text is ''; .*not empty"),
        (b'{"text": 3}', "its text is 3"),
        (b'{"prompt": "a", "completion": null}', "its completion is None"),
        (b'{"text": "\xff"}', "it is not UTF-8"),
        (rb'{"text": "\ud800"}', "it has characters, and no surrogates"),
        (b'{"messages": "hello"}', "its messages are 'hello'"),
        (b'{"messages": []}', "none of its messages is of the assistant"),
        (json.dumps({"messages": MESSAGES}).encode(), "none of its messages is of the assistant"),
        (b'{"messages": [{"role": "assistant"}]}', "its message 0 has the content None"),
        (
            b'{"messages": [{"role": "user", "content": ["x"]}, '
            b'{"role": "assistant", "content": "y"}]}',
            r"its message 0 has the content \['x'\]; .*write a text",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": 3, "content": "y"}, '
            b'{"role": "assistant", "content": "y"}]}',
            "its message 1 has the role 3",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "y", "name": "z"}]}',
            "the chat template failed",
        ),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")

    class Checking(ChatTokenizer):
        def encode(self, text, *, special_tokens=True):
            if any("\ud800" <= each <= "\udfff" for each in text):
                raise ValueError("text is odd; it has characters, and no surrogates; decode it")
            return super().encode(text, special_tokens=special_tokens)

    with pytest.raises(ValueError, match=f"line 2 of .*data.jsonl: .*{message}"):
        reader(Checking(BEGIN)).read(file)


def test_ids_beyond_the_vocabulary_name_their_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"prompt": "a", "completion": "~"}\n')
    tokenizer = ByteTokenizer()
    assert len(Reader(tokenizer, None, 9, ord("~") + 1).read(file)) == 2
    with pytest.raises(ValueError, match=r"line 2 of .*data.jsonl has the token 126, as .*ByteTok"):
        Reader(tokenizer, None, 9, ord("~")).read(file)


def test_the_last_answer_is_learnt_of_templates_that_change_what_they_wrote():
    longer = [*ANSWERED, *ANSWERED]
    with pytest.warns(UserWarning, match="line 1: .*only the last answer is learnt"):
        (sample,) = reader(Forgetful(BEGIN)).samples({"messages": longer}, "line 1")
    (alone,) = reader().samples({"messages": longer[-2:]}, "line 1")
    assert learnt(sample) == learnt(alone)


def test_files_without_samples(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n")
    with pytest.raises(ValueError, match=r"data.jsonl has no samples; each line is"):
        reader().read(file)
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"has no samples; its lines are single tokens"):
        reader(ByteTokenizer(), end=None).read(file)
    with pytest.raises(FileNotFoundError):
        reader().read(tmp_path / "other.jsonl")
