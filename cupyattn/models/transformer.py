"""A model: its config, its weights on one device, and its functions of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from types import ModuleType

import numpy as np

from cupyattn import LongRopeScaling, QuantizedWeight, Rotary, attention, rope_tables
from cupyattn.distributed import Group
from cupyattn.models.config import Config, RopeScaling
from cupyattn.models.forward import Attend, SecondStream, hidden_states, mean_loss, true_logits
from cupyattn.models.generation import Generates
from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.weights import Weights, named_arrays, named_parts
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown


class Model(Generates):
    """A language model in arrays, returned by `load` and `random`.

    Attributes
    ----------
    config : Config
        Its numbers.
    weights : Weights
        Its arrays, by name.
    dtype : str
        Of products, norms and weights that are not quantised: "float16", "float32" or "bfloat16".
        The sums of layers, the hidden states, are float32 in a float16 model.
    xp : module
        numpy or cupy, the library of its arrays.
    rotary : Rotary, or None
        The tables for all `positions`; None if positions have an embedding. Layers may have
        others: see `rotary_of`.
    positions : int
        The longest sequence with these tables: `Config.max_positions`, or with a
        `cupyattn.LongRopeScaling` its original length; see `for_length`.
    group : distributed.Group, or None
        The ranks that hold the model; config and weights are this rank's share.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        dtype: str,
        xp: ModuleType,
        read_tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        group: Group | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.xp = xp
        self.group = group
        self._read_tokenizer = read_tokenizer
        self._second_stream = SecondStream(xp)
        scaling, self.positions = config.rope_scaling, config.max_positions
        if isinstance(scaling, LongRopeScaling):
            self.positions = min(self.positions, scaling.original_length)
        self._long_rotary: Rotary | None = None
        self.rotary = self._tables(config.rope_base, config.rope_scaling)
        self._local_rotary = self.rotary
        if config.local_rope_base is not None:
            self._local_rotary = self._tables(config.local_rope_base, None)
        if config.global_rotary_dim is not None:
            self.rotary = self._tables_of_whole_heads(config.global_rotary_dim)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<Model {config.architecture}: {config.num_layers} layers, {config.num_heads} heads, "
            f"E = {config.hidden_size}, V = {config.vocab_size}, {self._kept()}, "
            f"{self.nbytes:,} bytes>"
        )

    def _tables(self, base: float, scaling: RopeScaling | None) -> Rotary | None:
        config = self.config
        if not config.rotary_dim:
            return None
        tables = rope_tables(self.positions, config.rotary_dim, base=base, scaling=scaling)
        cos, sin = map(self.xp.asarray, tables)
        return Rotary(cos, sin)

    def _tables_of_whole_heads(self, rotary_dim: int) -> Rotary:
        """Return tables for all pairs of a head of which only the first are rotated."""
        config = self.config
        dim = config.global_head_dim or config.head_dim
        cos, sin = rope_tables(self.positions, dim, base=config.rope_base)
        cos[:, rotary_dim // 2 :], sin[:, rotary_dim // 2 :] = 1, 0
        return Rotary(self.xp.asarray(cos), self.xp.asarray(sin))

    def for_length(self, length: int) -> Model:
        """Return this model with the rotary tables for sequences of a length.

        It is the model itself unless its scaling is a `cupyattn.LongRopeScaling` and the length is
        above `LongRopeScaling.original_length`: then all positions have other frequencies.
        """
        if length <= self.positions or self.positions == self.config.max_positions:
            return self
        twin = copy(self)
        twin.positions = self.config.max_positions
        if self._long_rotary is None:
            self._long_rotary = twin._tables(self.config.rope_base, self.config.rope_scaling)
        twin.rotary = twin._local_rotary = self._long_rotary
        return twin

    def rotary_of(self, layer: int) -> Rotary | None:
        """Return the rotary tables of a layer, None for a layer without rotary positions."""
        if layer in self.config.unrotated_layers:
            return None
        if self.config.global_rotary_dim is None:
            is_global = self.config.window_of(layer) is None
        else:
            is_global = layer in self.config.global_layers
        return self.rotary if is_global else self._local_rotary

    def attention_options(self, layer: int) -> Keywords:
        """Return the options of `cupyattn.attention` in a layer, except its rotary positions."""
        options = self.config.attention_options(layer)
        if not self.weights.layers:
            return options
        of_scores = self.weights.layers[layer].score_scale
        if of_scores != 1:
            scale = self.config.softmax_scale or self.config.heads_of(layer).head_dim ** -0.5
            options["softmax_scale"] = scale / of_scores
        return options

    def _kept(self) -> str:
        """Return how weights are kept."""
        parts = (part for _, part in named_parts(self.weights))
        kinds = {part.format for part in parts if isinstance(part, QuantizedWeight)}
        both = any(layer.up.activations for layer in self.weights.layers)
        rows = " x int8" if both else ""
        return f"{self.dtype}, layers in {', '.join(sorted(kinds))}{rows}" if kinds else self.dtype

    @property
    def nbytes(self) -> int:
        """The size of all weights, in bytes."""
        return sum(array.nbytes for _, array in named_arrays(self.weights))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """From text to ids and back, read at the first use; None if the model has no tokenizer.

        Raises
        ------
        NotImplementedError
            If the files have a tokenizer of a kind that is not read.
        ValueError
            If its files are damaged.
        RuntimeError
            If the package tokenizers is not installed.
        """
        return self._read_tokenizer()

    def hidden(self, ids: Array, positions: Array, attend: Attend) -> Array:
        """Return the hidden states after the last norm, the input of `head`.

        Parameters
        ----------
        ids, positions : int32 or int64 array (total,)
            Tokens of any number of sequences, one after the other, and the position of each.
        attend : callable
            ``attend(layer, q, k, v)`` is called once for each layer with q (total, H, D) and k, v
            (total, G, D), views that are not rotated, and returns (total, H, D), with the sizes of
            `Config.heads_of`. It chooses which keys a token sees, and applies `rotary_of`,
            `attention_options` and a cache.

        Returns
        -------
        array (total, E), dtype of the model
        """
        for states in self.hidden_states(ids, positions, attend):
            hidden = states
        return hidden

    def hidden_states(self, ids: Array, positions: Array, attend: Attend) -> Iterator[Array]:
        """Yield the result of `hidden`, and before it each step to it.

        These are `Config.num_layers` + 2 arrays (total, E): the embedded tokens, the hidden states
        after each layer, and those after the last norm. In a float16 model all but the last are
        float32.
        """
        given = self.config, self.weights, ids, positions, attend
        return hidden_states(*given, self._second_stream)

    def head(self, hidden: Array) -> Array:
        """Return the logits (rows, V) of hidden states (rows, E) after the last norm."""
        head, softcap = self.weights.head, self.config.logit_softcap
        return true_logits(head(hidden), self.weights.scales.head, softcap, self.xp)

    def logits(self, ids: object) -> Array:
        """Return the logits of every next token: causal attention, without a cache.

        Parameters
        ----------
        ids : integers (B, S)
            Token ids, an array or lists of B sequences of one length, at most
            `Config.max_positions`.

        Returns
        -------
        array (B, S, V), dtype of the model
            float32 in a float16 model whose logits may exceed 65,504.

        Raises
        ------
        TypeError, ValueError
            For ids that are not integers, do not have two axes, or are too long; on the CPU, and
            with ``backend(checks=True)``, for an id that is not in the vocabulary.

        Examples
        --------
        >>> import numpy as np
        >>> from cupyattn import models
        >>> tiny = models.PRESETS["gpt2"]._replace(
        ...     num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
        ...     intermediate_size=32, vocab_size=50,
        ... )
        >>> model = models.random(tiny, dtype="float32", xp=np)
        >>> model.logits([[3, 1, 4, 1, 5]]).shape
        (1, 5, 50)
        """
        ids = self._ids(ids)
        return self.head(self._dense_hidden(ids)).reshape(*ids.shape, self.config.vocab_size)

    def loss(self, ids: object, labels: object = None) -> Array:
        """Return the mean loss of next tokens: cross-entropy, in natural units.

        Parameters
        ----------
        ids : integers (B, S)
            Token ids, as in `logits`.
        labels : integers (B, S), optional
            The ids, by default, or -100 for tokens that do not count. A token is predicted from
            those before it, so the first of a sequence never counts.

        Returns
        -------
        array (), float32 (float64 of a float64 model)
            NaN if no token counts.

        Raises
        ------
        TypeError, ValueError
            As `logits`; also for labels of another shape, or, if values are checked, beyond the
            vocabulary.

        Notes
        -----
        At most 2**27 bytes of logits exist at a time. For the gradient see
        `cupyattn.models.training`.

        Examples
        --------
        An embedding of zeros makes each of 50 tokens equally likely:

        >>> import numpy as np
        >>> from cupyattn import models
        >>> tiny = models.PRESETS["gpt2"]._replace(
        ...     num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
        ...     intermediate_size=32, vocab_size=50,
        ... )
        >>> model = models.random(tiny, dtype="float32", xp=np)
        >>> model.weights.embedding[:] = 0
        >>> float(np.exp(model.loss([[3, 1, 4, 1, 5]]))).__round__(3)
        50.0
        """
        ids = self._ids(ids)
        labels = ids if labels is None else self._ids(labels)
        if labels.shape != ids.shape:
            raise error(
                ValueError,
                f"got labels of shape {labels.shape} for ids of shape {ids.shape}",
                "there must be a label for each id: the id itself, or -100",
                "pass labels of the shape of ids",
            )
        following = self.xp.full_like(labels, -100)
        following[:, :-1] = labels[:, 1:]
        hidden = self._dense_hidden(ids)
        given = following.reshape(-1), self.xp, self.config.logit_softcap
        return mean_loss(self.weights.head, hidden, *given, self.weights.scales.head)

    def with_weights(self, weights: Weights) -> Model:
        """Return this model with other weights; all else is shared."""
        twin = copy(self)
        twin.weights = weights
        return twin

    def _dense_hidden(self, ids: Array) -> Array:
        batch, length = ids.shape
        positions = self.xp.tile(self.xp.arange(length, dtype=np.int32), batch)
        return self.hidden(ids.reshape(-1), positions, self.dense_attention(batch, length))

    def dense_attention(self, batch: int, length: int) -> Attend:
        """Return the attention, for `hidden`, of sequences of one length that begin at 0."""
        model = self.for_length(length)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            q, k, v = (each.reshape(batch, length, *each.shape[1:]) for each in (q, k, v))
            options = self.attention_options(layer)
            out = attention(q, k, v, rotary=model.rotary_of(layer), **options)
            return out.reshape(-1, *out.shape[2:])

        return attend

    def _ids(self, given: object) -> Array:
        try:
            ids = self.xp.asarray(given)
        except ValueError:  # lists of several lengths
            raise _no_ids(ValueError, f"got ids = {shown(given)}, which is not an array") from None
        if ids.dtype.kind not in "iu":
            raise _no_ids(TypeError, f"got ids of {ids.dtype}")
        if ids.ndim != 2:
            raise _no_ids(ValueError, f"got ids with {ids.ndim} axes")
        if ids.shape[1] > self.config.max_positions:
            raise error(
                ValueError,
                f"got {ids.shape[1]} tokens",
                f"the model has {self.config.max_positions} positions",
                f"pass at most {self.config.max_positions} tokens",
            )
        return ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int64)


def _no_ids(kind: type[Exception], passed: str) -> Exception:
    return error(
        kind,
        passed,
        "ids must be integers (B, S): sequences of one length",
        "pass for example [tokenizer.encode(text)]",
    )
