"""The forward of all models, from token ids to the mean loss.

With x the hidden states of all tokens, one row each, a layer of GPT-2 and of Llama is

    x = x + output(attention(norm(x)))
    x = x + down(activation(up(mlp_norm(x))))

and a layer of Phi-2, where attention and the MLP are parallel, as in GPT-J,

    h = norm(x)
    x = x + down(activation(up(h))) + output(attention(h))

where one product computes qkv and up, and the MLP runs concurrently with attention. A layer of
Gemma has the sums of Llama, with a norm of each term,

    x = x + output_norm(output(attention(norm(x))))
    x = x + down_norm(down(activation(up(mlp_norm(x)))))

and one of Gemma 4 multiplies this x by a scalar.

GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) adds a learned
row for each position to the embedding, its norms are layer norms, its activation is gelu. Llama
(Touvron et al., arXiv:2302.13971) has rotary positions, RMS norms and silu(gate) * up, which is the
activation "swiglu" of one product. Phi-2 (Javaheripi and Bubeck, "Phi-2: the surprising power of
small language models", 2023) rotates only the first features of a head, and has layer norms. The
weights and the config contain all of that: a norm with a bias is a layer norm.

Qwen3 (arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786) normalise each head of q and k before it is
rotated; over a paged cache one launch does both. Gemma 2 (arXiv:2408.00118) and 3 scale the
embedding by sqrt(E), have weights 1 + w in all norms, and windows in some layers; Gemma 2 has
softcaps. Gemma 4 has weights w, normalises the heads of v too, and its layers without a window have
other heads, whose keys may be their values. Phi-3 (arXiv:2404.14219) is Llama with fused products
in its files. Some layers of SmolLM3 do not rotate.

Each call below is one kernel; the sum of two embeddings is one more. All other sums are computed
where a product is stored. In a float16 model the hidden states x are float32, because models that
were trained in bfloat16 exceed 65,504 there: norms read x and give float16, and a sum is computed
by the norm that reads it, Gemma's norm of the term as well. Each term of a sum may be scaled by a
power of two (`cupyattn.models.float16_range`). The loss computes the head and its cross-entropy for
a limited number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn import (
    GatedGrads,
    cross_entropy,
    embedding,
    geglu,
    geglu_backward,
    gelu,
    gelu_backward,
    rms_norm,
    silu,
    silu_backward,
    swiglu,
    swiglu_backward,
)
from cupyattn.models.config import GATED, Config, Heads
from cupyattn.models.weights import Layer, Norm, Product, Weights
from cupyattn.ops.linear.api_quantised import multiplies_int8
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array


class SecondStream:
    """A second stream: on a GPU the ``with`` block runs concurrently with what follows it.

    Work in the block sees all that was queued before it, and after `join` everything sees its
    results, also in a CUDA graph that is captured around both. On NumPy arrays the block runs at
    once.

    Memory allocated in the block is reused only in the block, where the next ``with`` makes it wait
    for all readers. So use an instance from one stream at a time.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._stream: Any = None

    def __enter__(self) -> None:
        if self._xp is np:
            return
        if self._stream is None:
            self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._stream.wait_event(self._xp.cuda.get_current_stream().record())
        self._stream.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._xp is not np:
            self._stream.__exit__(*raised)

    def join(self) -> None:
        """Make all work that is queued from now on wait for the block."""
        if self._xp is not np:
            self._xp.cuda.get_current_stream().wait_event(self._stream.record())


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, approximate="tanh"),
}
BACKWARDS: dict[str, Callable[..., Array | GatedGrads]] = {
    "gelu": gelu_backward,
    "gelu_tanh": partial(gelu_backward, approximate="tanh"),
    "silu": silu_backward,
    "swiglu": swiglu_backward,
    "geglu": geglu_backward,
    "geglu_tanh": partial(geglu_backward, approximate="tanh"),
}


def activated(preactivation: Array, activation: str) -> Array:
    """Return the activation of rows: (..., F), from (..., 2 F) if it is gated."""
    return FUNCTIONS[activation](preactivation)


def activation_backward(dout: Array, preactivation: Array, activation: str, into: Array) -> Array:
    """Write the gradient of `activated` into an array, which may be the preactivation itself."""
    grads = GatedGrads(into) if activation in GATED else into
    BACKWARDS[activation](dout, preactivation, grads=grads)
    return into


Attend = Callable[[int, Array, Array, Array], Array]
"""``attend(layer, q, k, v)``: attention of q (total, H, D) to k and v (total, G, D), as q is.

They are not rotated: rotary positions, a cache and which keys a query sees are its business.
`Model.attention_options` and `Model.rotary_of` are those of a layer.
"""


class NormingAttend:
    """An `Attend` that can also normalise the heads of q and k, in its launch that rotates them."""

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Return attention of heads that are normalised already, or need no norm."""
        return self.attended(layer, q, k, v, None, None)

    def attended(
        self, layer: int, q: Array, k: Array, v: Array, q_norm: Norm | None, k_norm: Norm | None
    ) -> Array:
        """Return attention of heads after these norms."""
        raise NotImplementedError


def hidden_states(
    config: Config,
    weights: Weights,
    ids: Array,
    positions: Array,
    attend: Attend,
    second_stream: SecondStream,
) -> Iterator[Array]:
    """Yield the hidden states (total, E): embedded, after each layer, after the last norm."""
    x, term = embedded(config, weights, ids, positions), None
    growth = query_growth(config, positions, weights.embedding.dtype)
    for index, layer in enumerate(weights.layers):
        width = layer.output.weight.shape[1]
        also = (layer.up,) if layer.mlp_norm is None and layer.qkv_up is None else ()
        codes = codes_for(x, layer.qkv_up or layer.qkv, *also)
        normed, x = sum_and_norm(layer.norm, x, term, **codes)
        yield x
        scales = layer.scales
        if layer.mlp_norm is None:
            in_stream = x.dtype != normed.dtype
            qkv, inner = qkv_and_inner(config, layer, normed)
            with second_stream:
                y = layer.down(inner(), residual=None if in_stream else x)
            attended = attended_heads(config, layer, index, qkv, growth, attend)
            second_stream.join()
            y = layer.output(attended.reshape(len(x), width), residual=y)
            x, term = (x, Term(y, scales.after_output)) if in_stream else (y, None)
        else:
            attended = attended_heads(config, layer, index, layer.qkv(normed), growth, attend)
            attended = attended.reshape(len(x), width)
            x, term = added(layer.output, layer.output_norm, attended, x, scales.after_output)
            normed, x = sum_and_norm(layer.mlp_norm, x, term, **codes_for(x, layer.up))
            # Without a name for what is inside, which would keep its memory through the next layer.
            x, term = added(
                layer.down,
                layer.down_norm,
                layer.up(normed, activation=config.activation),
                x,
                scales.after_down,
            )
        if layer.scalar is not None:
            x, term = scaled(x, term, layer.scalar)
    normed, x = sum_and_norm(weights.norm, x, term)
    yield x
    yield normed


class Term(NamedTuple):
    """A term of a float32 stream, which the next norm adds: `norm` of an array, times `scale`."""

    array: Array
    scale: Array | None
    norm: Norm | None = None


def scaled(x: Array, term: Term | None, scalar: Array) -> tuple[Array, Term | None]:
    """Multiply x and its term by a scalar, x in place."""
    x *= scalar
    if term is None:
        return x, None
    if term.scale is None:
        return x, term._replace(scale=scalar.astype(np.float32).repeat(x.shape[1]))
    return x, term._replace(scale=term.scale * scalar)


def embedded(config: Config, weights: Weights, ids: Array, positions: Array) -> Array:
    """Return the first hidden states, of a float16 model in float32."""
    if weights.embedding.dtype == np.float16:
        scale = config.embedding_scale or 1.0
        x = embedding(weights.embedding, ids, scale=scale / weights.scales.embedding)
        if weights.positions is not None:
            x += embedding(weights.positions, positions, scale=1 / weights.scales.positions)
        return x
    x = embedding(weights.embedding, ids)
    if config.embedding_scale is not None:
        x *= rounded_to(x.dtype, config.embedding_scale)
    if weights.positions is not None:
        x += embedding(weights.positions, positions)
    return x


def sum_and_norm(norm: Norm, x: Array, term: Term | None, **options: Any) -> tuple[Array, ...]:
    """Return the norm of x plus a term, then the sum, and then statistics that are requested."""
    if term is not None:
        if term.norm is not None:
            options["x_norm"] = term.norm.rms
        return norm(term.array, residual=x, x_scale=term.scale, **options)
    found = norm(x, **options)
    normed, *statistics = found if isinstance(found, tuple) else (found,)
    return (normed, x, *statistics)


def codes_for(x: Array, /, *readers: Product) -> Keywords:
    """Return the options of a norm of x that makes int8 of its rows, if all readers multiply that.

    They would make the same codes of the rows themselves, in a pass of their own. Adapters read
    rows in the model's dtype.
    """
    if not all(isinstance(each, Product) and each.activations for each in readers):
        return {}
    if not multiplies_int8(x):
        return {}
    rotation = getattr(readers[0].weight, "rotation", None)  # all have the K of x
    return {"quantize": "int8", "rotation": rotation}


def qkv_and_inner(config: Config, layer: Layer, normed: Array) -> tuple[Array, Callable[[], Array]]:
    """Return q, k and v in one array, and a function that computes the inside of the MLP."""
    if layer.qkv_up is None:
        return layer.qkv(normed), lambda: layer.up(normed, activation=config.activation)
    both = layer.qkv_up(normed)
    columns = len(layer.qkv.weight)
    return both[:, :columns], lambda: activated(both[:, columns:], config.activation)


def rounded_to(dtype: np.dtype, number: float) -> float:
    """Return a number as a dtype holds it."""
    return float(np.asarray(number).astype(dtype))


def added(
    product: Product, norm: Norm | None, given: Array, x: Array, scale: Array | None
) -> tuple[Array, Term | None]:
    """Return x plus a product, or plus the norm of a product.

    If x is a float32 stream of a float16 model, return x itself, and a term that the next norm
    normalises and adds; `scale` is the term's.
    """
    if x.dtype != given.dtype:
        return x, Term(product(given), scale, norm)
    if norm is None:
        return product(given, residual=x), None
    total = norm(product(given))
    total += x
    return total, None


def query_growth(config: Config, positions: Array, dtype: np.dtype) -> Array | None:
    """Return the factors of queries (total, 1, 1), if they grow with their positions."""
    if config.query_growth is None:
        return None
    rate, length = config.query_growth
    passed: Any = np.floor(positions.astype(np.float32) / length)
    factors = 1 + rate * np.log1p(passed)
    return factors.astype(dtype)[:, None, None]


def normed_heads(
    heads: Heads, layer: Layer, qkv: Array, growth: Array | None
) -> tuple[Array, Array, Array]:
    """Return the heads of q, k and v, normalised if the layer does so.

    The norms of q and k, and q times its growth, are written over their rows of qkv.
    """
    q, k, v = heads_with_values(heads, layer, qkv)
    if layer.q_norm is not None and layer.k_norm is not None:
        layer.q_norm(q, out=q)
        layer.k_norm(k, out=k)
    if growth is not None:
        q *= growth
    return q, k, v


def attended_heads(
    config: Config, layer: Layer, index: int, qkv: Array, growth: Array | None, attend: Attend
) -> Array:
    """Return attention of the heads of qkv, normalised if the layer does so.

    A `NormingAttend` normalises those of q and k itself, except where queries grow between norm and
    rotation.
    """
    heads = config.heads_of(index)
    if isinstance(attend, NormingAttend) and growth is None:
        given = heads_with_values(heads, layer, qkv)
        return attend.attended(index, *given, layer.q_norm, layer.k_norm)
    return attend(index, *normed_heads(heads, layer, qkv, growth))


def heads_with_values(heads: Heads, layer: Layer, qkv: Array) -> tuple[Array, Array, Array]:
    """Return the heads of q and k as views of qkv, and those of v normalised in a new array.

    Those of v are a view too in a layer that does not normalise them.
    """
    q, k, v = heads_of(heads, qkv)
    return q, k, v if layer.v_eps is None else rms_norm(v, eps=layer.v_eps)


def heads_of(heads: Heads, qkv: Array) -> tuple[Array, Array, Array]:
    """Return the heads of q, k and v, as views of the rows of their one product.

    Where keys are the values too, v is k.
    """
    queries, keys = heads.num_heads, heads.num_heads + heads.num_kv_heads
    rows = qkv.reshape(len(qkv), sum(heads.counts), heads.head_dim)
    k = rows[:, queries:keys]
    return rows[:, :queries], k, k if heads.keys_as_values else rows[:, keys:]


LOGITS_BYTES = 2**27
"""The most memory of logits: 512 rows of a vocabulary of 128,256 in float16."""
_ROWS_TOGETHER = 128  # whole tiles of the products


def loss_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of losses, and of gradients that are added up: float32, or float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def rows_at_once(columns: int, itemsize: int) -> int:
    """Return how many rows of logits are computed at a time."""
    rows = max(LOGITS_BYTES // (columns * itemsize), 1)
    return rows - rows % _ROWS_TOGETHER if rows > _ROWS_TOGETHER else rows


def softcapped(logits: Array, cap: float | None, xp: ModuleType) -> Array:
    """Write cap * tanh(logits / cap) over the logits, if there is a cap; return them."""
    if cap is None:
        return logits
    if logits.dtype.kind == "f":
        logits /= cap
        xp.tanh(logits, out=logits)
        logits *= cap
    else:  # bfloat16
        wide = xp.tanh(logits.astype(np.float32) / cap) * cap
        logits[...] = wide.astype(logits.dtype)
    return logits


def true_logits(logits: Array, scale: float, softcap: float | None, xp: ModuleType) -> Array:
    """Return what the head computed times `scale`, without this scale, and capped.

    Logits that are not scaled are written over. Others may be beyond float16: they become float32.
    """
    if scale != 1:
        logits = logits.astype(np.float32)
        logits *= 1 / scale
    return softcapped(logits, softcap, xp)


def logit_chunks(
    head: Product,
    hidden: Array,
    xp: ModuleType,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Iterator[tuple[slice, Array]]:
    """Yield the rows and the logits of chunks of hidden states (rows, E).

    Each chunk is written over the one before. `cupyattn.linear_cross_entropy` does so too, but has
    no bias and always computes the gradient of the weight.
    """
    columns = len(head.weight)
    step = min(rows_at_once(columns, hidden.dtype.itemsize), len(hidden))
    logits = xp.empty((step, columns), hidden.dtype)
    for start in range(0, len(hidden), step or 1):
        rows = slice(start, min(start + step, len(hidden)))
        computed = head(hidden[rows], out=logits[: rows.stop - start])
        yield rows, true_logits(computed, scale, softcap, xp)


def mean_loss(
    head: Product,
    hidden: Array,
    labels: Array,
    xp: ModuleType,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Array:
    """Return the mean loss of the rows whose label is not -100, NaN if there are none."""
    total = xp.zeros((), loss_dtype(hidden.dtype))
    for rows, logits in logit_chunks(head, hidden, xp, softcap, scale):
        total += cross_entropy(logits, labels[rows], reduction="sum")
    with np.errstate(invalid="ignore"):
        return total / xp.asarray(labels != -100).sum(dtype=total.dtype)
