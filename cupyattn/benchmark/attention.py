"""``python -m cupyattn.benchmark attention`` and ``attention_backward``: every call of attention.

The work counted is that of the products over the kept scores: 4 * B * H * S * S * D forward where
D = Dv, 2.5 times that for the backward, and half of it if the call is causal. Variants time a
whole training step, and documents in one sequence whose empty tiles ``block_mask`` skips.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark import libraries
from cupyattn.benchmark.cases import Case, Harness, NotAskedError, TimedImplementation, products_of
from cupyattn.benchmark.command import Benchmark, Option, every, with_defaults
from cupyattn.benchmark.libraries import BACKENDS, names_among, swapped, tensor_of
from cupyattn.benchmark.timer import READ, Round
from cupyattn.cli.arguments import integer
from cupyattn.ops.attention.modifiers import ScoreMod
from cupyattn.ops.attention.options import ACCUMULATORS, IMPLEMENTATIONS
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.rope.api import rope_tables
from cupyattn.runtime.annotations import Json, Keywords
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM

PLAIN = "plain"
FEWER_SCORES = ["causal", "window"]
"""Options that drop scores: they should be faster than the plain call."""
BLOCK_MASKED = ["mask_mod", "block_mask"]
OPTIONS = (
    *("causal", "window", "softcap", "bias", "mask", "alibi", "score_mod", "sinks", "dropout"),
    *("rotary", "mask_mod", "block_mask"),
)
TEACHING = ("tiled", "naive")
"""Implementations that are there to be read."""
TAKES = ("plain", "causal", "bias", "mask", "dropout")
"""Options of PyTorch's scaled_dot_product_attention."""
TEACHING_FLOPS = 1e12
"""Work of a call up to which the teaching kernels are timed: some seconds."""
TILE = (128, 64)
"""Queries and keys of the tiles that are counted: those of the forward at head dim 64."""
DETERMINISTIC = {"both": (False, True), "only": (True,), "never": (False,)}
_TOLERANCE = {"forward": 0.02, "backward": 0.05, "step": 0.05}
_DROPOUT_P = 0.1
_SOFTCAP = 50.0
_MASKED = 0.1  # of the scores


@dataclass(frozen=True)
class SelfAttentionProblem:
    """Self-attention of `batch` sequences; with `queries`, only the last tokens are queries."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    window: int
    queries: int | None = None
    documents: int | None = None
    """Documents in each sequence, for the options mask_mod and block_mask."""

    @property
    def labels(self) -> Json:
        """The labels of a row."""
        found = asdict(self)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q (B, Sq, H, D), k (B, S, H, D), v (B, S, H, Dv) and out (B, Sq, H, Dv)."""
        sq, dims = self.queries or self.seqlen, (self.head_dim, self.head_dim_v)
        return {
            name: (self.batch, length, self.heads, dims[name in ("v", "out")])
            for name, length in (("q", sq), ("k", self.seqlen), ("v", self.seqlen), ("out", sq))
        }

    @property
    def bytes(self) -> int:
        """The bytes of q, k, v and out."""
        return sum(map(math.prod, self.shapes.values())) * dtype_of(self.dtype).itemsize

    def scores(self, option: str) -> float:
        """Return how many scores of a head are kept."""
        causal, sq = self.causal or option == "causal", self.queries or self.seqlen
        if option == "window":
            rows = np.arange(self.seqlen - sq, self.seqlen)
            first = np.maximum(rows - self.window, 0)
            last = rows if causal else np.minimum(rows + self.window, self.seqlen - 1)
            return float((last - first + 1).sum())
        share = self.kept() if option == "block_mask" else 1.0
        return share * (sq * self.seqlen - (sq**2 / 2 if causal else 0))

    def flops(self, direction: str, option: str) -> float:
        """Return the operations of the products over those scores.

        The forward has two products, over D and Dv. The backward has five (Dao, arXiv:2307.08691,
        section 4.1), three over D and two over Dv, however often a kernel repeats one. A training
        step has all seven.

        Examples
        --------
        >>> problem = SelfAttentionProblem(4, 32, 4096, 64, 64, "float16", causal=False, window=512)
        >>> forward = 4 * 4 * 32 * 4096**2 * 64
        >>> [problem.flops(what, "plain") / forward for what in ("forward", "backward", "step")]
        [1.0, 2.5, 3.5]
        """
        of_d, of_dv = {"forward": (1, 1), "backward": (3, 2), "step": (4, 3)}[direction]
        products = 2 * (of_d * self.head_dim + of_dv * self.head_dim_v)
        return products * self.batch * self.heads * self.scores(option)

    def document(self) -> np.ndarray:
        """Return the document of each token: log-normal lengths (sigma 0.5)."""
        drawn = np.random.default_rng(1).lognormal(sigma=0.5, size=self.documents or 1)
        ends = np.round(np.cumsum(drawn) / drawn.sum() * self.seqlen)
        return np.searchsorted(ends, np.arange(self.seqlen), side="right").astype(np.int32)

    def kept(self) -> float:
        """Return the share of tiles in which something is seen."""
        document, length = self.document(), self.seqlen
        (first, last), (first_key, last_key) = (
            (
                document[::tile],
                document[np.minimum(np.arange(tile, length + tile, tile), length) - 1],
            )
            for tile in TILE
        )
        # Documents are numbered in order: a tile is seen if the ranges of its sides overlap.
        seen = (first[:, None] <= last_key) & (last[:, None] >= first_key)
        return float(seen.mean())


class Tensors(NamedTuple):
    """The arrays of a problem: random q, k, v and dout, and memory for the forward's results."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array


class AttentionInputs:
    """The inputs of all implementations of a case, made when the first one is prepared."""

    def __init__(self, problem: SelfAttentionProblem, option: str, harness: Harness) -> None:
        self.problem, self.option, self.harness = problem, option, harness

    @cached_property
    def arrays(self) -> Tensors:
        """The tensors of the problem."""
        shapes, dtype = self.problem.shapes, self.problem.dtype
        source, xp = self.harness.arrays(), self.harness.xp
        q, k, v, dout = (source.normal(*shapes[x], dtype=dtype) for x in ("q", "k", "v", "out"))
        batch, queries, heads, _ = shapes["q"]
        out = xp.empty(shapes["out"], dtype_of(dtype))
        return Tensors(q, k, v, dout, out, xp.empty((batch, heads, queries), np.float32))

    @cached_property
    def arguments(self) -> Keywords:
        """The option's keyword arguments; raises MemoryError if its arrays have no room."""
        return arguments_of(self.option, self.problem, self.harness.xp)

    def errors(self, found: Array) -> Mapping[str, float]:
        """Compare a result with the float32 kernels', for the first sequence.

        The errors are the norm of the difference by the norm of the result, and the largest
        difference.
        """
        if not self.harness.filled:
            return {}
        xp, options = self.harness.xp, dict(self.arguments)
        first = (x[:1].astype(np.float32) for x in self.arrays[:3])
        exact = cupyattn.attention(*first, **options).astype(np.float64)
        difference = found[:1].astype(np.float64) - exact
        return {
            "relative_error": float(xp.sqrt((difference**2).sum() / (exact**2).sum())),
            "largest_error": float(xp.abs(difference).max()),
        }


def arguments_of(option: str, problem: SelfAttentionProblem, xp: ModuleType) -> Keywords:
    """Return an option's keyword arguments of a call, with arrays of its size."""
    heads, sq, window = problem.heads, problem.shapes["q"][1], problem.window
    even, numbers, shape = (
        problem.head_dim // 2 * 2,
        np.random.default_rng(2),
        (1, 1, sq, problem.seqlen),
    )
    make: dict[str, Callable[[], Json]] = {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window_size": (window, 0 if problem.causal else window)},
        "softcap": lambda: {"softcap": _SOFTCAP},
        "bias": lambda: {"bias": _bias(problem, sq, xp)},
        "mask": lambda: {"mask": xp.asarray(numbers.random(shape, np.float32) >= _MASKED)},
        "alibi": lambda: {"alibi_slopes": _slopes(heads, xp)},
        "score_mod": lambda: {"score_mod": _alibi(heads, xp)},
        "sinks": lambda: {"sinks": xp.zeros(heads, np.float32)},
        "dropout": lambda: {"dropout_p": _DROPOUT_P, "seed": 1},
        "rotary": lambda: {"rotary": tuple(map(xp.asarray, rope_tables(problem.seqlen, even)))},
        "mask_mod": lambda: {"mask_mod": _documents(problem, xp)},
        "block_mask": lambda: {
            "mask_mod": cupyattn.block_mask(_documents(problem, xp), sq, problem.seqlen)
        },
    }
    return {"causal": problem.causal, **make.get(option, dict)()}


def _alibi(heads: int, xp: ModuleType) -> ScoreMod:
    """Return ALiBi as an expression, which the model has 13 % slower on a T4 than the option."""
    return ScoreMod(
        "score - slopes[h] * abs(q_idx - k_idx)",
        gradient="grad",
        slopes=_slopes(heads, xp),
    )


def _documents(problem: SelfAttentionProblem, xp: ModuleType) -> cupyattn.MaskMod:
    """Return the mask by which a token sees the tokens of its own document."""
    return cupyattn.MaskMod(
        "document[q_idx] == document[k_idx]",
        document=xp.asarray(problem.document()),
    )


def _bias(problem: SelfAttentionProblem, sq: int, xp: ModuleType) -> Array:
    """Return one bias for each head, the same for all sequences, as relative positions have."""
    numbers = np.random.default_rng(1).standard_normal((problem.heads, sq, 1), np.float32)
    column = xp.asarray(numbers.astype(dtype_of(problem.dtype)))
    shape = (1, problem.heads, sq, problem.seqlen)
    return xp.ascontiguousarray(xp.broadcast_to(column, shape))


def _slopes(heads: int, xp: ModuleType) -> Array:
    """Return powers of two from 2**(-8 / H) to 2**-8 (Press et al., arXiv:2108.12409)."""
    return xp.asarray(2.0 ** (-8.0 * np.arange(1, heads + 1, dtype=np.float32) / heads))


def implementations(
    direction: str, arguments: argparse.Namespace, inputs: AttentionInputs
) -> list[TimedImplementation]:
    """Return this library's kernels, and the baselines that have the option.

    "flash" has one-pass and deterministic gradients; the teaching kernels do the same either way,
    and take no option but causal.
    """
    modes = (False,) if direction == "forward" else DETERMINISTIC[arguments.deterministic]
    sums = [each == "float16" for each in getattr(arguments, "accumulator", ["float32"])]
    own = [
        TimedImplementation(
            f"cupyattn {name}{' deterministic' if mode and name == 'flash' else ''}"
            f"{' with float16 sums' if half_sums else ''}",
            partial(_own_calls, direction, name, mode, inputs, half_sums),
            _comparable if name != "int8" else lambda _: None,
            inputs.errors if name == "int8" or half_sums else None,
        )
        for name in arguments.implementation
        if name not in TEACHING or inputs.option in (PLAIN, "causal")
        for mode in (modes if name == "flash" else modes[:1])
        for half_sums in ([False] if name in TEACHING else sums)
    ]
    other = [
        TimedImplementation(
            name,
            partial(_baseline_calls, direction, name, inputs),
            (lambda out: out) if name == "cupy"
            else swapped if direction == "forward" else libraries.all_swapped,
        )
        for name in _baselines_of(direction, inputs)
    ]  # fmt: skip
    return [*own, *other]


def _comparable(result: Any) -> Any:
    return result if hasattr(result, "shape") else result[:3]


def _own_calls(
    direction: str, name: str, deterministic: bool, inputs: AttentionInputs, half_sums: bool
) -> Round:
    flops = inputs.problem.flops(direction, inputs.option)
    if name in TEACHING and flops > TEACHING_FLOPS and inputs.harness.filled:
        raise NotAskedError(
            f'not timed: "{name}" is a teaching kernel, and a call has {flops / 1e12:.1f} TFLOP; '
            f"{TEACHING_FLOPS / 1e12:g} is the limit"
        )
    q, k, v, dout, out, lse = inputs.arrays
    options = {"implementation": name, **inputs.arguments}
    if direction == "forward":
        options["accumulator"] = "float16" if half_sums else "float32"
        return [partial(cupyattn.attention, q, k, v, out=out, **options)]
    forward = partial(cupyattn.attention, q, k, v, return_lse=True, out=(out, lse))
    given, empty = inputs.arguments, inputs.harness.xp.empty_like
    more = (empty(given[each]) if each in given else None for each in ("bias", "sinks"))
    grads = AttentionGrads(*map(empty, (q, k, v)), *more)
    backward = partial(
        cupyattn.attention_backward, dout, q, k, v, out, lse, deterministic=deterministic,
        grads=grads, **options,
    )  # fmt: skip
    if direction == "backward":
        forward(**inputs.arguments)
        return [backward]

    def step() -> AttentionGrads:
        forward(**options)
        return backward()

    return [step]


def _baselines_of(direction: str, inputs: AttentionInputs) -> list[str]:
    problem, option = inputs.problem, inputs.option
    causal = problem.causal or option == "causal"
    if problem.queries is not None and causal:  # PyTorch aligns the first query, not the last
        return []
    simple = ("plain", "causal")
    takes: Mapping[str, tuple[str, ...]] = {
        "triton": (*simple, "block_mask"),
        "cupy": simple if direction == "forward" else (),
    }
    return [name for name in inputs.harness.baselines if option in takes.get(name, TAKES)]


def _baseline_calls(direction: str, name: str, inputs: AttentionInputs) -> Round:
    if name == "cupy":
        return _composed(inputs)
    torch, arguments, harness = inputs.harness.torch, inputs.arguments, inputs.harness
    q, k, v, dout = (swapped(tensor_of(torch, array)) for array in inputs.arrays[:4])
    tensors, within = [q, k, v], libraries.ANYWHERE
    if name == "triton":
        seen = (lambda b, h, i, j: i >= j) if arguments.get("causal") else None
        if inputs.option == "block_mask":
            document = tensor_of(torch, harness.xp.asarray(inputs.problem.document()))
            seen = lambda b, h, i, j: document[i] == document[j]  # noqa: E731
        attend = libraries.flex_attention(torch, seen, q.shape[2], k.shape[2])
    else:
        taken = {"is_causal": arguments.get("causal", False),
                 "dropout_p": arguments.get("dropout_p", 0.0)}  # fmt: skip
        if "mask" in arguments:
            taken["attn_mask"] = tensor_of(torch, arguments["mask"])
        if "bias" in arguments:
            tensors.append(tensor_of(torch, arguments["bias"]))
        attend, within = libraries.torch_attention(torch, name, **taken)
        if name == "compile":
            attend = harness.compiled(attend)
    if direction == "forward":
        return libraries.forward_calls(torch, attend, tensors, within)
    make = libraries.backward_calls if direction == "backward" else libraries.step_calls
    return make(torch, attend, tensors, within, dout=dout)


def _composed(inputs: AttentionInputs) -> Round:
    """Keep the scores in memory: two products of cuBLAS, and array functions between them."""
    xp, causal = inputs.harness.xp, inputs.arguments["causal"]
    q, k, v = (array.swapaxes(1, 2) for array in inputs.arrays[:3])
    scale = np.float32(q.shape[-1] ** -0.5)
    rows, keys = xp.arange(q.shape[2])[:, None], xp.arange(k.shape[2])
    kept = keys <= rows + k.shape[2] - q.shape[2]

    def call() -> object:
        scores = xp.matmul(q, k.swapaxes(2, 3)).astype(np.float32)
        scores *= scale
        if causal:
            scores = xp.where(kept, scores, np.float32(-np.inf))
        scores -= scores.max(-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return xp.matmul(scores.astype(v.dtype), v).swapaxes(1, 2)

    return [call]


def option_names(text: str) -> list[str]:
    """Read the names of options from the command line."""
    if text in ("all", "none"):
        return list(OPTIONS) if text == "all" else []
    return names_among((*OPTIONS, "all", "none"), text)


def problems(arguments: argparse.Namespace) -> Iterator[SelfAttentionProblem]:
    """Yield every dtype, head dim, length, batch, and number of queries if they are given."""
    for each in every(arguments, "dtype", "head_dim", "seqlen"):
        dim, fits = each["head_dim"], max((arguments.tokens or 0) // each["seqlen"], 1)
        masked = {*BLOCK_MASKED} & {*arguments.options}
        for batch in [fits] if arguments.tokens else arguments.batch:
            for queries in getattr(arguments, "queries", None) or [None]:
                yield SelfAttentionProblem(
                    batch=batch, heads=arguments.heads or max(arguments.width // dim, 1), **each,
                    head_dim_v=arguments.head_dim_v or dim, causal=arguments.causal,
                    window=arguments.window, queries=queries,
                    documents=arguments.documents if masked else None,
                )  # fmt: skip


def cases(direction: str, arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every problem with every option, the plain call first."""
    for problem in problems(arguments):
        for option in (PLAIN, *arguments.options):
            if option == "causal" and problem.causal:
                continue
            inputs = AttentionInputs(problem, option, harness)
            moved = {"forward": 1, "backward": 2, "step": 3}[direction]  # q, k, v, out; gradients
            yield Case(
                {**problem.labels, "option": option},
                implementations(direction, arguments, inputs),
                flops=problem.flops(direction, option),
                bytes=moved * problem.bytes,
                ceiling=products_of(problem.dtype) if problem.queries is None else READ,
                tolerance=np.inf if option == "dropout" else _TOLERANCE[direction],
            )


def _options(own: tuple[str, ...], default: list[str]) -> tuple[Option, ...]:
    head_dim = integer(1, MAX_HEAD_DIM)
    return (
        Option("head-dim", [64, 80, 128], "head dims of q and k", head_dim),
        Option("seqlen", [128, 256, 512, 1024, 2048, 4096], "tokens of a sequence"),
        Option("batch", [1, 4, 8], "sequences of a call"),
        Option("dtype", ["float16", "float32"], "dtype of the arrays", choices=tuple(STORAGE)),
        Option("implementation", default, "kernels to time; naive and tiled only plain and "
               "causal, where a call takes seconds at most", choices=own),
        Option("head-dim-v", None, "head dim of v (default: that of q)", head_dim),
        Option("tokens", None, "tokens of a call, which set the number of sequences instead of "
               "--batch"),
        Option("width", 2048, "features of a token, which set the number of heads"),
        Option("heads", None, "heads, instead of --width"),
        Option("window", 512, "keys on each side of a query that the window keeps", integer(0)),
        Option("documents", 16, "documents in a sequence, for mask_mod and block_mask"),
        Option("causal", False, "make every call causal"),
        Option("options", FEWER_SCORES, "options to time besides the plain call, with commas "
               f"between them: {', '.join(OPTIONS)}; or all, or none (default: "
               f"{','.join(FEWER_SCORES)})",
               option_names, metavar="NAMES"),
    )  # fmt: skip


_QUERIES = Option("queries", [], "queries of a sequence, its last tokens; memory bounds them "
                  "(default: all tokens)", metavar="Q")  # fmt: skip
_ACCUMULATOR = Option("accumulator", ["float32"], "sums of weights times v of flash and int8; "
                      "with float16 ones, and of int8, rows have the error of the first sequence",
                      choices=ACCUMULATORS)  # fmt: skip
_DETERMINISTIC = Option(
    "deterministic", "both", "of flash: time the deterministic kernels and the one-pass kernel, "
    "only them, or never", choices=tuple(DETERMINISTIC),
)  # fmt: skip
_NOTE = (
    "half of that for causal calls, the kept scores for a window, and the kept tiles, of "
    f"{TILE[0]} queries by {TILE[1]} keys, for a block_mask."
)
FORWARD = Benchmark(
    name="attention",
    title="Attention forward",
    help="times and TFLOP/s of attention forward on a GPU, with and without options",
    description="Time attention(q, k, v, out=out): by dtype, head dim, length and batch, plain and "
    "with each option, whose time is compared with the plain call's.",
    note=f"TFLOP/s count 4 * B * H * S * S * D (2 * (D + Dv) where they differ): {_NOTE}",
    options=(*_options(IMPLEMENTATIONS, ["flash", "tiled", "naive"]), _QUERIES, _ACCUMULATOR),
    cases=partial(cases, "forward"),
    baselines=("eager", *BACKENDS, "compile", "triton", "cupy"),
    compare="option",
    quick={
        **{"head_dim": [64, 128, 80, 40, 96, 160, 192, 256, 512], "seqlen": [4096], "batch": [4]},
        **{"dtype": ["float16"], "implementation": ["flash"], "options": ["causal"]},
    },
)
BACKWARD = replace(
    FORWARD,
    name="attention_backward",
    title="Attention backward",
    help="times and TFLOP/s of attention's gradients on a GPU, one-pass and deterministic",
    description="Time attention_backward(..., grads=grads): by dtype, head dim, length and batch, "
    "plain and with each option, whose time is compared with the plain call's; both the kernel "
    "that adds atomically and the deterministic ones.",
    note="TFLOP/s count the whole backward as 2.5 forwards, 10 * B * H * S * S * D (6 * D + 4 * Dv "
    f"where they differ): {_NOTE}",
    options=(*_options(("flash", "naive"), ["flash", "naive"]), _DETERMINISTIC),
    cases=partial(cases, "backward"),
    baselines=("eager", *BACKENDS, "compile", "triton"),
)
_PHI_2: Keywords = {"batch": [8], "seqlen": [2048], "heads": 32, "head_dim": [80]}
TRAINING_STEP = replace(
    BACKWARD,
    name="training_step",
    title="Attention's training step",
    help="time forward with backward, by default of a layer with Phi-2's heads",
    note="TFLOP/s count 3.5 forwards. Memory is what the step takes beyond q, k, v, dout, and out, "
    "lse, dq, dk, dv.",
    options=with_defaults(
        BACKWARD.options, **_PHI_2, dtype=["float16"], causal=True, options=[], window=0
    ),
    cases=partial(cases, "step"),
    baselines=("eager", "compile"),
    quick={},
)
_DOCUMENTS: Keywords = {
    **{"seqlen": [16384], "batch": [1], "heads": 16, "head_dim": [64, 128]},
    **{"dtype": ["float16"], "implementation": ["flash"], "options": BLOCK_MASKED},
}


def _block_mask(parent: Benchmark, suffix: str) -> Benchmark:
    return replace(
        parent,
        name=f"block_mask{suffix}",
        title=f"{parent.title} of documents in one sequence",
        help="time documents in one sequence, by a mask_mod and by a block_mask, whose empty tiles "
        "are skipped",
        options=with_defaults(parent.options, **_DOCUMENTS),
        baselines=("triton",),
        quick={"limit": 20.0},
    )


FORWARD = replace(
    FORWARD, variants={"training-step": TRAINING_STEP, "block-mask": _block_mask(FORWARD, "")}
)
BACKWARD = replace(BACKWARD, variants={"block-mask": _block_mask(BACKWARD, "_backward")})
