"""Low-rank adapters of a model whose weights stay as they are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyattn.models.checkpoints.contents import HUGGING_FACE, LinearModule, modules_of
from cupyattn.models.forward import loss_dtype
from cupyattn.models.generation.options import as_count
from cupyattn.models.training import peft
from cupyattn.models.training.backward import (
    AdaptedProduct,
    ArrayPart,
    Gradients,
    adapted_already,
    loss_and_gradients,
)
from cupyattn.models.training.batches import DIGEST, Batch, Sample
from cupyattn.models.training.lora_options import ALL_LINEAR, LoraOptions
from cupyattn.models.training.merged_parts import MergedParts, parted
from cupyattn.models.training.trainable import fingerprint, require_samples, require_whole
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, Product, Weights, row_factors, rows_of
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import on_host

_SEEDS = 2**64


def _rows_of_modules(model: Model) -> dict[str, int]:
    """Return the number of rows of each linear layer of a model."""
    naming, config = HUGGING_FACE[model.config.architecture], model.config
    return {
        module.name: module.rows.stop - module.rows.start
        for index, layer in enumerate(model.weights.layers)
        for modules in modules_of(naming, config, index, layer).values()
        for module in modules
    }


class LoraAdapters:
    """Adapters of a model's linear layers, as a `Trainable`.

    An adapter of a module with the weight W (N, K) has A (rank, K) and B (N, rank). The module then
    computes ``x W^T + bias + alpha / rank * dropout(x) A^T B^T``.

    Parameters
    ----------
    model : Model
        Its weights, which may be quantised, are never changed.
    rank : int
        The rank of the matrix that is added to each weight.
    alpha : float
        The scale is alpha / rank.
    dropout : float
        Probability of dropping an input of the adapters, in training alone.
    targets : "all-linear", list of str, or str
        The modules with adapters: all linear layers but the head; those with these published names
        (``q_proj``, ``gate_proj``; GPT-2's ``c_attn`` is one module); or those whose whole name a
        regular expression matches.
    seed : int
        For the first A: uniform, up to K**-0.5 in size, the same on every device. B is 0 at first,
        so that nothing is added.
    rank_pattern, alpha_pattern : mapping from str to number
        Other ranks and alphas for modules whose last parts match a regular expression. Each has to
        match a module with an adapter.
    use_rslora : bool
        Scale by alpha / sqrt(rank).
    layers_to_transform : int, or sequence of int, optional
        The layers with adapters, by default all; for targets that are a list of names. A target
        that is a module's whole name has an adapter in any layer.
    layers_pattern : str, or sequence of str
        The names that may be before the number of such a layer, by default any.

    Attributes
    ----------
    arrays : dict from str to array
        float32, by name: ``model.layers.0.self_attn.q_proj.lora_A.weight``.
    model : Model
        The model with adapters, for logits, loss and generate; each `updated` copies what was
        learnt.
    options : LoraOptions
        The options.

    Raises
    ------
    TypeError, ValueError
        For options out of range, and targets none of which is a module of the model.
    NotImplementedError
        For a model with adapters, or over several ranks.

    Warns
    -----
    UserWarning
        For targets that are no modules of the model, if others are.

    Notes
    -----
    Hu et al., "LoRA: low-rank adaptation of large language models", arXiv:2106.09685; for weights
    in four bits Dettmers et al., "QLoRA", arXiv:2305.14314. Modules that one product computes, such
    as q, k and v, read x once, and share a dropout mask; PEFT draws one for each, which has the
    same distribution for each module but takes a copy of x, and a product with A, for each.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["llama-3.2-1b"]._replace(
    ...     num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=8,
    ...     intermediate_size=32, vocab_size=50, max_positions=64,
    ... )
    >>> model = models.random(tiny, dtype="float32", xp=np)
    >>> adapters = LoraAdapters(model, rank=4, targets=["q_proj", "v_proj"])
    >>> adapters
    <LoraAdapters of 2 modules, rank 4: 224 numbers>
    >>> [(name[25:], array.shape) for name, array in adapters.arrays.items()]
    [('q_proj.lora_A.weight', (4, 16)), ('q_proj.lora_B.weight', (16, 4)),
     ('v_proj.lora_A.weight', (4, 16)), ('v_proj.lora_B.weight', (8, 4))]
    >>> bool((adapters.model.logits([[1, 2, 3]]) == model.logits([[1, 2, 3]])).all())
    True
    """

    def __init__(
        self,
        model: Model,
        /,
        *,
        rank: int = 16,
        alpha: float = 32,
        dropout: float = 0.0,
        targets: str | Iterable[str] = ALL_LINEAR,
        seed: int = 0,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        use_rslora: bool = False,
        layers_to_transform: int | Sequence[int] | None = None,
        layers_pattern: str | Sequence[str] = (),
    ) -> None:
        require_whole(model)
        given: Any = rank, alpha, dropout, targets, rank_pattern or {}, alpha_pattern or {}
        layers = layers_to_transform, layers_pattern
        self.options = LoraOptions._make((*given, use_rslora, *layers)).checked()
        self._base = self._loaded_with = model
        self._merged: MergedParts | None = None
        self.arrays: dict[str, Array] = {}
        self._places: dict[str, ArrayPart] = {}
        self.model = model.with_weights(self._with_adapters(seed))
        self.updated()

    def __repr__(self) -> str:
        learnt = sum(array.size for array in self.arrays.values())
        rank, modules = self.options.rank, len(self.arrays) // 2
        merged = f", and {len(self._merged.tensors)} merged tensors" if self._merged else ""
        return f"<LoraAdapters of {modules} modules, rank {rank}: {learnt:,} numbers{merged}>"

    def require(self, samples: Sequence[Sample], /) -> None:
        """Raise for samples beyond the vocabulary or the positions; see `Trainable`."""
        if not self.arrays and self._merged:
            raise error(
                NotImplementedError,
                f"{self!r} of DoRA, or of the head and the embedding alone",
                "these were merged when they were loaded, and are not trained",
                "train other adapters of merged(), or train these by PEFT",
            )
        require_samples(self._base.config, samples)

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
        return loss_and_gradients(
            self.with_dropout(seed),
            batch,
            Gradients(self._places, self.arrays, into, accumulate),
            num_labels=num_labels,
            loss_scale=loss_scale,
        )

    def updated(self) -> None:
        """Round the learnt arrays into the arrays of the products."""
        for name, place in self._places.items():
            place.fill(self.arrays[name])

    def identity(self) -> Json:
        """Return what losses depend on except ``arrays``; see `Trainable`."""
        options = self.options
        return {
            "alpha": options.alpha,
            "dropout": options.dropout,
            "alpha_pattern": dict(options.alpha_pattern),
            "use_rslora": options.use_rslora,
            "the model's weights": DIGEST + fingerprint(self._base.weights),
        }

    def merged(self) -> Model:
        """Return a model without adapters, whose weights include them.

        Returns
        -------
        Model
            Weights with adapters are new arrays in the model's dtype, W + alpha / rank * B A,
            computed in float32 and rounded once, in float16 to infinity beyond 65,504; all others
            are shared. A quantised weight with an adapter is dequantised, because quantising it
            again would lose the adapter. If there is no memory for that, use `model`, which adds
            the adapters as it computes.
        """
        return self._merge({})

    def _merge(self, magnitudes: Mapping[str, np.ndarray]) -> Model:
        """Return `merged`, with rows of these lengths in the modules that have some."""
        config, layers = self._base.config, []
        for index, layer in enumerate(self.model.weights.layers):
            merged: dict[str, Product] = {}
            named = modules_of(HUGGING_FACE[config.architecture], config, index, layer)
            for field, product in layer._asdict().items():
                if isinstance(product, AdaptedProduct):
                    lengths = self._lengths(named[field], product, magnitudes)
                    if lengths is not None:
                        factors, _ = row_factors(layer, field, config, index)
                        lengths *= self._base.xp.asarray(factors.astype(lengths.dtype))
                    kind = product.a.dtype
                    merged[field] = self._wide(product).merged(
                        self._base.xp, dtype=kind, lengths=lengths
                    )
            if "qkv_up" in merged:
                whole, first = merged["qkv_up"], len(layer.qkv.weight)
                merged["qkv"] = rows_of(whole, slice(None, first))
                merged["up"] = rows_of(whole, slice(first, None))
            layers.append(layer._replace(**merged))
        return self._base.with_weights(self._base.weights._replace(layers=tuple(layers)))

    def _wide(self, product: AdaptedProduct) -> AdaptedProduct:
        """Return a product whose adapters have what was learnt, without rounding."""
        wide = loss_dtype(product.a.dtype)
        made = {id(array): array.astype(wide) for array in (product.a, product.b)}
        for name, place in self._places.items():
            if id(place.array) in made:
                place._replace(array=made[id(place.array)]).fill(self.arrays[name])
        return product._replace(a=made[id(product.a)], b=made[id(product.b)])

    def _lengths(
        self,
        modules: list[LinearModule],
        product: AdaptedProduct,
        magnitudes: Mapping[str, np.ndarray],
    ) -> Array | None:
        """Return the length of each row of a product, NaN for rows that keep theirs."""
        if not magnitudes:
            return None
        lengths = np.full(len(product.weight), np.nan, loss_dtype(product.a.dtype))
        for name, rows in modules:
            if name in magnitudes:
                lengths[rows] = magnitudes[name]
        return self._base.xp.asarray(lengths)

    def save(self, folder: str | os.PathLike[str], *, base_model: str | None = None) -> None:
        """Write adapter_config.json and adapter_model.safetensors, as PEFT does.

        Parameters
        ----------
        folder : str or path
            Made if need be. Both files are complete before they replace others.
        base_model : str, optional
            The name or path of the model, which the files then contain.

        Raises
        ------
        OSError
            If they cannot be written, as on a full disk; older files are as they were.
        ValueError
            For numbers that are not finite.
        """
        options, arrays, more = self.options, self.arrays, None
        if self._merged is not None:
            options, more = self._merged.options, self._merged.written
            arrays = {**self.arrays, **self._merged.tensors}
        model = self._loaded_with
        peft.write(folder, options, arrays, model=model, base_model=base_model, more=more)

    @classmethod
    def load(
        cls,
        model: Model,
        folder: str | os.PathLike[str],
        /,
        *,
        dropout: float | None = None,
        base_model: str | None = None,
    ) -> LoraAdapters:
        """Read adapters of a model from a folder that `save` or PEFT wrote.

        A warning reports other weights than in their training. With another dtype or format, and
        for files of PEFT, only the names of the models are compared.

        Parameters
        ----------
        model : Model
            The model that they were trained with.
        folder : str or path
        dropout : float, optional
            Replaces their own, for more training.
        base_model : str, optional
            The model's name or path.

        Raises
        ------
        FileNotFoundError
            If a file is missing.
        ValueError
            For files that are damaged, and adapters of another model: with other modules or
            shapes, or, if `save` wrote them, another config.
        NotImplementedError
            For features of PEFT other than LoRA and DoRA.

        Notes
        -----
        Adapters of the head and the embedding, and whole weights of these (``modules_to_save``),
        are merged into the model that the adapters then are of; the head no longer has the
        embedding's weight if one of the two differs. Training leaves them as they are, and `save`
        writes them again. Adapters with magnitudes (DoRA) are all merged, computed in float32 and
        rounded once; quantised weights are decoded for it. They are for inference: ``arrays`` is
        empty. Names of targets that the model lacks are passed over.
        """
        options, extras, tensors = peft.read(folder, model, base_model)
        peft.require_ranks(folder, options, tensors)
        if dropout is not None:
            options = options._replace(dropout=dropout)
        modules = _rows_of_modules(model)
        base, tensors, merged = parted(folder, model, options, extras, tensors, modules)
        try:
            ours = options.fitting(modules)
            if merged is not None and not tensors:
                adapters = cls._without_any(base, ours)
            else:
                adapters = cls(base, **ours._asdict())
        except ValueError as failure:
            raise peft.unfit(folder, str(failure).partition("; ")[0]) from failure
        found = peft.fitting(folder, tensors, {n: a.shape for n, a in adapters.arrays.items()})
        for name, array in adapters.arrays.items():
            array[...] = model.xp.asarray(found[name])
        adapters.updated()
        adapters._loaded_with = model
        if merged is not None:
            adapters._take(folder, merged)
        return adapters

    @classmethod
    def _without_any(cls, model: Model, options: LoraOptions) -> LoraAdapters:
        """Return adapters of no module: all that there were are merged into the model."""
        adapters = cls.__new__(cls)
        adapters.options, adapters.model, adapters._base = options, model, model
        adapters.arrays, adapters._places = {}, {}
        return adapters

    def _take(self, folder: str | os.PathLike[str], merged: MergedParts) -> None:
        """Keep merged parts for `save`, and merge all modules if they have magnitudes."""
        self._merged = merged
        if not merged.magnitudes:
            return
        adapted = {name.rpartition(".lora_")[0] for name in self.arrays}
        if adapted != merged.magnitudes.keys():
            raise peft.unfit(folder, "some of their modules have magnitudes, and others have none")
        self._base = self._merge(merged.magnitudes)
        learnt = {name: on_host(array) for name, array in self.arrays.items()}
        self._merged = merged._replace(tensors={**learnt, **merged.tensors})
        self.model, self.arrays, self._places = self._base, {}, {}

    def _with_adapters(self, seed: int) -> Weights:
        weights, config = self._base.weights, self._base.config
        naming = HUGGING_FACE[config.architecture]
        generator = np.random.default_rng(as_count("seed", seed, 0))
        layers: list[Layer] = []
        names: list[str] = []
        for index, layer in enumerate(weights.layers):
            adapted = {}
            for field, modules in modules_of(naming, config, index, layer).items():
                names += (module.name for module in modules)
                chosen = [each for each in modules if self.options.targeted(each.name)]
                if chosen:
                    factors, _ = row_factors(layer, field, config, index)
                    product = getattr(layer, field)
                    adapted[field] = self._adapted(product, chosen, generator, factors)
            layers.append(layer._replace(**adapted))
        if lacking := self.options.require_found(names):
            warnings.warn(
                f"the targets {', '.join(map(repr, lacking))} are no modules of this model, which "
                "has adapters of the others",
                stacklevel=3,
            )
        return weights._replace(layers=tuple(layers))

    def _adapted(
        self,
        product: Product,
        modules: list[LinearModule],
        generator: np.random.Generator,
        factors: np.ndarray,
    ) -> AdaptedProduct:
        """Add the adapters of some modules to the product that they are rows of.

        B has the factors of the rows of a float16 model's weight (`cupyattn.models.float16_range`).
        """
        if isinstance(product, AdaptedProduct):
            raise adapted_already()
        xp, dtype = self._base.xp, dtype_of(self._base.dtype)
        (height, width), learnt = product.weight.shape, loss_dtype(dtype)
        ranks = [self.options.rank_of(module.name) for module in modules]
        a, b = xp.zeros((sum(ranks), width), dtype), xp.zeros((height, sum(ranks)), dtype)
        first = 0
        for (name, rows), rank in zip(modules, ranks, strict=True):
            ours = slice(first, first + rank)
            start = generator.uniform(-1, 1, (rank, width)) * width**-0.5
            self.arrays[f"{name}.lora_A.weight"] = xp.asarray(start.astype(learnt))
            self.arrays[f"{name}.lora_B.weight"] = xp.zeros((rows.stop - rows.start, rank), learnt)
            self._places[f"{name}.lora_A.weight"] = ArrayPart(a, (ours,))
            scale: Any = self.options.scale_of(name)
            if (factors[rows] != 1).any():
                scale = xp.asarray(scale * factors[rows, None], learnt)
            self._places[f"{name}.lora_B.weight"] = ArrayPart(b, (rows, ours), scale)
            first = ours.stop
        return AdaptedProduct(product.weight, product.bias, a, b, activations=product.activations)

    def with_dropout(self, seed: int) -> Model:
        """Return `model` for training: each product has another dropout seed."""
        weights, dropout = self.model.weights, float(self.options.dropout)
        if not dropout:
            return self.model
        fields = len(Layer._fields)

        def part(product: object, number: int) -> Any:
            if not isinstance(product, AdaptedProduct):
                return product
            own = (seed * len(weights.layers) * fields + number) % _SEEDS
            return product._replace(dropout_p=dropout, seed=own)

        layers = [
            Layer(*(part(each, index * fields + place) for place, each in enumerate(layer)))
            for index, layer in enumerate(weights.layers)
        ]
        return self.model.with_weights(weights._replace(layers=tuple(layers)))
