"""Training a bigram model: it learns, skips what overflows, and adds batches up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.bigram import Bigram, counting
from support.devices import everywhere
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.training.batch import Sample
from cupyattn.models.training.data import split
from cupyattn.models.training.evaluation import loss_of
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import AdamWOptions
from cupyattn.models.training.packing import Packing
from cupyattn.models.training.scaling import LossScale
from cupyattn.models.training.schedules import Schedule
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


def test_behind_the_last_step_nothing_is_drawn():
    made = trainer(steps=3)
    list(made)
    position = made.packing.position
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step 4 of 3; a schedule has rates of its own steps"):
            made.step()
    assert (made.number, made.packing.position) == (3, position)


@pytest.mark.parametrize(
    ("ids", "learnt", "kind", "message"),
    [
        ([1.5, 2], [True] * 2, TypeError, "ids of float64; a sample is a row of token ids"),
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


def test_what_is_no_training():
    with pytest.raises(ValueError, match="accumulate = 0; it is an integer of 1 or more"):
        trainer(accumulate=0)
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
    """Before the first step, and of those that are only looked at too."""
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


def test_a_sample_of_one_token_is_no_trouble():
    samples = [Sample.of([3], [True]), *counting(TOKENS, samples=3)]
    made = Trainer(
        Bigram(TOKENS), Packing(samples, batch_tokens=64), schedule=Schedule("constant", 0.1, 2)
    )
    assert all(np.isfinite(step.loss) for step in made)


def test_a_step_without_labels_is_refused():
    samples = [Sample.of([3], [True]), Sample.of([3, 4], [False] * 2)]
    made = Trainer(
        Bigram(TOKENS), Packing(samples, batch_tokens=64), schedule=Schedule("constant", 0.1, 2)
    )
    with pytest.raises(ValueError, match=r"step 1 has no labels; .*; leave out samples without"):
        made.step()


@pytest.mark.parametrize("number", [-1, 1.5, "2", None, True])
def test_what_is_counted_is_an_integer(number):
    for name in ("accumulate", "seed"):
        with pytest.raises((TypeError, ValueError), match=f"{name} = .*; it is an integer of . or"):
            trainer(Bigram(TOKENS), **{name: number})
    for name in ("batch_tokens", "seed"):
        with pytest.raises((TypeError, ValueError), match=f"{name} = .*; it is an integer of . or"):
            Packing(counting(TOKENS, samples=3), **{"batch_tokens": 64, name: number})
