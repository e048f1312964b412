"""Full fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.forward import loss_dtype
from cupyattn.models.training.backward import (
    AdaptedProduct,
    ArrayPart,
    Gradients,
    adapted_already,
    loss_and_gradients,
)
from cupyattn.models.training.batches import DIGEST, Batch, Sample
from cupyattn.models.training.trainable import fingerprint, require_samples, require_whole
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, factors_of, is_learnt, named_parts
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


class FullWeights:
    """Every weight of a model, as a `Trainable`: full fine-tuning, of the model itself.

    Parameters
    ----------
    model : Model
        `updated` changes its arrays. Arrays that are not float32 are learnt as float32 copies.

    Attributes
    ----------
    arrays : dict from str to array
        float32, by the names of `cupyattn.models.Weights`: ``layers.0.qkv.weight``. If the
        embedding is the head's weight too, its gradients are the sum of both uses.

    Raises
    ------
    NotImplementedError
        For a model with quantised weights, with adapters, or over several ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import models
    >>> from cupyattn.models.training.batches import Batch
    >>> tiny = models.PRESETS["gpt2"]._replace(
    ...     num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
    ...     intermediate_size=32, vocab_size=50,
    ... )
    >>> trained = FullWeights(models.random(tiny, dtype="float32", xp=np))
    >>> ids, labels, positions, bounds = np.array([[3, 1, 4], [1, 4, 1], [0, 1, 2], [0, 3, 3]])
    >>> batch = Batch(*(x.astype(np.int32) for x in (ids, labels, positions, bounds[:2])), 3)
    >>> into = {name: np.zeros_like(array) for name, array in trained.arrays.items()}
    >>> options = {"num_labels": 3, "loss_scale": 1.0, "seed": 0, "accumulate": False}
    >>> loss = trained.gradients(batch, into, **options)

    A step against the gradient lowers the loss:

    >>> for name, array in trained.arrays.items():
    ...     array -= 0.1 * into[name]
    >>> trained.updated()
    >>> bool(trained.gradients(batch, into, **options) < loss)
    True
    """

    def __init__(self, model: Model) -> None:
        require_whole(model)
        self._model = model
        self._began_with = fingerprint(model.weights)
        self.arrays: dict[str, Array] = {}
        self._places: dict[str, ArrayPart] = {}
        factors = factors_of(model.weights, model.config)
        for name, array in named_parts(model.weights):
            if not is_learnt(name):
                continue
            if isinstance(array, QuantizedWeight):
                raise error(
                    NotImplementedError,
                    f"{name} is {array!r}",
                    "quantised weights cannot be trained",
                    "train LoraAdapters of the model, or load it without quantize",
                )
            learnt = array.astype(loss_dtype(array.dtype), copy=False)
            factor = factors.get(name, 1.0)
            if name in factors:
                factor = (
                    factor if isinstance(factor, float) else model.xp.asarray(factor, np.float32)
                )
                learnt /= factor
            self.arrays[name] = learnt
            self._places[name] = ArrayPart(array, (slice(None),), factor)
        for index, layer in enumerate(model.weights.layers):
            if any(isinstance(product, AdaptedProduct) for product in layer):
                raise adapted_already()
            if layer.qkv_up is not None:  # this product computes
                self._place_rows(f"layers.{index}", layer)

    def _place_rows(self, name: str, layer: Layer) -> None:
        for kind in ("weight", "bias"):
            whole, first = getattr(layer.qkv_up, kind), len(layer.qkv.weight)
            if whole is not None:
                for field, rows in (("qkv", slice(None, first)), ("up", slice(first, None))):
                    of = f"{name}.{field}.{kind}"
                    self._places[of] = ArrayPart(whole, (rows,), self._places[of].scale)

    def require(self, samples: Sequence[Sample], /) -> None:
        """Raise ValueError for samples beyond the vocabulary or the positions; see `Trainable`."""
        require_samples(self._model.config, samples)

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
        """Return the loss of a batch, and write or add its gradients; see `Trainable`."""
        gradients = Gradients(self._places, self.arrays, into, accumulate)
        return loss_and_gradients(
            self._model, batch, gradients, num_labels=num_labels, loss_scale=loss_scale
        )

    def identity(self) -> Json:
        """Return what losses depend on except ``arrays``; see `Trainable`."""
        return {"the model's weights": DIGEST + self._began_with}

    def updated(self) -> None:
        """Round the learnt arrays into the weights of the model."""
        for name, place in self._places.items():
            place.fill(self.arrays[name])
