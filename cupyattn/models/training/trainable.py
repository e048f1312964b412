"""A protocol of models to train, the loss of samples, and fingerprints of weights and configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.config import Config
from cupyattn.models.forward import mean_loss
from cupyattn.models.training.backward import SampleAttention
from cupyattn.models.training.batches import IGNORED, Batch, Packing, Sample, moved
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Weights, named_arrays, named_parts
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import on_host


def require_whole(model: Model) -> None:
    """Raise NotImplementedError for one rank's share of a model."""
    if model.group is not None:
        raise error(
            NotImplementedError,
            f"a model over {model.group.size} ranks",
            "a model is trained on one GPU: gradients are not summed over ranks",
            "load the model without a group, with quantize='nf4' if memory is short",
        )


def require_samples(config: Config, samples: Sequence[Sample]) -> None:
    """Raise ValueError for samples that a model has no rows or no positions for.

    A GPU would compute NaN from them, in whatever step they come.
    """
    for number, sample in enumerate(samples):
        if len(sample.ids) > config.max_positions:
            raise error(
                ValueError,
                f"samples[{number}] has {len(sample.ids)} tokens",
                f"the model has {config.max_positions} positions",
                "cut it into several samples",
            )
        for name, ids in sample._asdict().items():
            known = (ids >= 0) & (ids < config.vocab_size)
            if name == "labels":
                known |= ids == IGNORED
            if not known.all():
                raise error(
                    ValueError,
                    f"samples[{number}] has {int(ids[np.argmin(known)])} among its {name}",
                    f"the model has tokens 0 to {config.vocab_size - 1}",
                    "encode texts with the tokenizer of this model",
                )


class Trainable(Protocol):
    """A model of which some arrays are learnt.

    Attributes
    ----------
    arrays : dict of float32 arrays
        The learnt arrays, by name, on the model's device. A trainer replaces them by views of one
        array, and writes to them.
    """

    arrays: dict[str, Array]

    def require(self, samples: Sequence[Sample], /) -> None:
        """Raise ValueError for samples that the model cannot take, before the first step."""
        ...

    def gradients(
        self,
        batch: Batch,
        into: dict[str, Array],
        /,
        *,
        num_labels: int,
        loss_scale: float | Array,
        seed: int,
        accumulate: bool,
    ) -> Array:
        """Return the loss of a batch, and write or add its gradients.

        Parameters
        ----------
        batch : Batch
            On the model's device.
        into : dict of float32 arrays
            Where ``loss_scale * d loss / d array`` goes, by the names of ``arrays``.
        num_labels : int
            Divides the sum of the tokens' losses: the labels of a whole step, not of this batch.
        loss_scale : float, or array of one float32
            Multiplies gradients, not the loss.
        seed : int
            Of dropout.
        accumulate : bool
            Add to what `into` holds.

        Returns
        -------
        array of one float32, shape ()
        """
        ...

    def updated(self) -> None:
        """Use the numbers that were written to ``arrays``."""
        ...

    def identity(self) -> Json:
        """Return what losses depend on except ``arrays``, as JSON: options, and frozen weights.

        It must be the same when a training is resumed.
        """
        ...


def batch_loss(model: Model, batch: Batch) -> Array:
    """Return the mean loss of a batch's labels, by the forward alone."""
    attend = SampleAttention(model, batch)
    hidden = model.hidden(batch.ids, batch.positions, attend)
    softcap, scale = model.config.logit_softcap, model.weights.scales.head
    given = batch.labels, model.xp, softcap, scale
    return mean_loss(model.weights.head, hidden, *given)


def loss_of(model: Model, samples: Sequence[Sample], *, batch_tokens: int) -> float:
    """Return the mean loss of all labels of the samples, in batches of so many tokens."""
    require_samples(model.config, samples)
    packing = Packing(samples, batch_tokens=batch_tokens)
    total = labels = 0.0
    for _ in packing.epoch(0):
        batch = next(packing)
        count = int(np.count_nonzero(batch.labels != IGNORED))
        if count:
            total += count * float(batch_loss(model, moved(batch, model.xp)))
        labels += count
    if not labels:
        raise error(
            ValueError,
            "got samples without labels",
            "a loss needs at least one token to predict",
            "pass samples of two tokens or more (Sample.num_labels)",
        )
    return total / labels


_OF_A_MODEL = (
    "architecture", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "norm_eps", "activation", "rotary_dim", "rope_base", "qkv_bias",
    "output_bias", "mlp_bias", "head_bias",
)  # fmt: skip
_OF_SOME = (
    "qk_norm", "global_layers", "local_rope_base", "unrotated_layers", "softmax_scale",
    "attention_softcap", "logit_softcap", "embedding_scale", "query_growth", "global_head_dim",
    "global_kv_heads", "global_rotary_dim", "keys_as_values",
)  # fmt: skip
"""Traits that only some models have: those of the others have the fingerprints that they had."""
_ITEMS = 64
"""Items of each array: training changes all arrays of a model."""


def fingerprint(weights: Weights) -> str:
    """Return a hexadecimal number of some items of each array, and of the sum of all bits.

    Evenly spaced items depend on the order; the sum, in one pass, depends on every item.

    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(num_layers=1, vocab_size=99)
    >>> one, same, other = (models.random(tiny, seed=seed, xp=np) for seed in (1, 1, 2))
    >>> fingerprint(one.weights) == fingerprint(same.weights) != fingerprint(other.weights)
    True
    """
    found = sha256()
    for name, array in named_arrays(weights):
        found.update(name.encode())
        flat = array.reshape(-1)
        found.update(on_host(flat[:: max(flat.size // _ITEMS, 1)]).tobytes())
        words = flat.view(f"u{array.dtype.itemsize}")
        found.update(int(words.sum(dtype=np.uint64)).to_bytes(8, "little"))
    return found.hexdigest()[:16]


def kept_in(weights: Weights) -> str:
    """Return the dtypes and formats of weights; the fingerprint of a model depends on them.

    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(num_layers=1, vocab_size=99)
    >>> kept_in(models.random(tiny, dtype="float16", quantize="nf4", xp=np).weights)
    'float16, nf4'
    """
    parts = (part for _, part in named_parts(weights))
    kinds = {p.format if isinstance(p, QuantizedWeight) else p.dtype.name for p in parts}
    both = any(layer.up.activations for layer in weights.layers)
    return ", ".join(sorted(kinds)) + (" x int8" if both else "")


def config_fingerprint(config: Config) -> str:
    """Return a hexadecimal number of what is the same in each file of a model.

    A folder and a GGUF file of one model differ in the longest text, in the special tokens, in
    whether the head is repeated, and in the last digits of float32 numbers.
    """
    values = [getattr(config, name) for name in _OF_A_MODEL]
    defaults = Config._field_defaults
    values += [each for name in _OF_SOME if (each := getattr(config, name)) != defaults[name]]
    rounded = [f"{value:.6g}" if isinstance(value, float) else value for value in values]
    return sha256(json.dumps(rounded).encode()).hexdigest()[:16]
