"""``python -m cupyattn.benchmark generate``: whole models, and the kernels of a step of decoding.

The measure is the memory's speed: a step of decoding reads all weights once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn import models
from cupyattn.benchmark.cases import Harness, Row, row_of, without
from cupyattn.benchmark.command import Benchmark, Option, every
from cupyattn.benchmark.libraries import BASELINES
from cupyattn.benchmark.other_models import GENERATING, Generate, PromptSize, TimedRun, baseline
from cupyattn.benchmark.timer import COPY
from cupyattn.cli.arguments import integer
from cupyattn.models.forward import Term, activated, heads_of, heads_with_values, scaled
from cupyattn.models.generation.steps import append_options
from cupyattn.models.loading import QUANTIZE, quantises_to
from cupyattn.models.weights import empty
from cupyattn.runtime.annotations import Json, Keywords
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.progress import progress

T4_GB_PER_S = 320.0
"""The memory of a T4 by its data sheet."""
_STALL_BYTES = 2**30
"""Bytes of each copy that keeps the GPU busy while a step is queued."""
OWN = "cupyattn"
_ALL = "step: all parts"


def own(model: Any, size: PromptSize, **options: Any) -> Generate:
    """Return this library's generation, from one cache and with steps that stay captured."""
    generator = models.Generator(
        model, lengths=[size.prompt + size.new] * size.batch, max_batch=size.batch, **options
    )

    def generate(prompts: list[list[int]], new: int) -> TimedRun:
        began = time.perf_counter()
        submitted = [generator.submit(prompt, max_new_tokens=new) for prompt in prompts]
        while not all(each.outputs[0] for each in submitted):
            generator.step()
        first = time.perf_counter()
        early = sum(len(each.outputs[0]) for each in submitted)
        while not generator.idle:
            generator.step()
        ended = time.perf_counter()
        tokens = [each.outputs[0] for each in submitted]
        return TimedRun(first - began, ended - first, tokens, early)

    return generate


def timed(generate: Generate, size: PromptSize, vocab_size: int, runs: int) -> Json:
    """Return the times of runs after a first one, which compiles and captures.

    ``first_s`` is the time of the first token, ``step_s`` that of a step after it, for each run;
    ``tokens_per_s`` is the median over the runs, of tokens after the first.
    """
    done = [generate(size.prompts(vocab_size, seed), size.new) for seed in range(runs + 1)]
    measured = done[1:]
    rates = [(sum(map(len, run.tokens)) - run.early) / run.rest_s for run in measured]
    return {
        "first_s": [run.first_s for run in measured],
        "step_s": [size.batch / max(rate, 1e-9) for rate in rates],
        "tokens_per_s": statistics.median(rates),
    }


class DecodeCall(NamedTuple):
    """A call of a step, and the least that it reads and writes."""

    name: str
    bytes: int
    call: Callable[[], object]


def parts_of(model: Any, cache: Any, tables: Any, context: int) -> list[DecodeCall]:
    """Return the calls of a step in their order, on arrays of their own.

    The sequences of `tables` have one new token and `context` tokens each. Calls are those of
    `Model.hidden` and `Model.head`, one for one; what they compute is not passed on.
    """
    xp, config, weights = model.xp, model.config, model.weights
    rows, kind = tables.num_sequences, dtype_of(model.dtype)

    def drawn(*shape: int) -> Array:
        some = np.random.default_rng(0).standard_normal(shape, np.float32)
        return xp.asarray((0.1 * some).astype(kind))

    x = drawn(rows, config.hidden_size)
    # A float16 model adds to a float32 stream in its norms, others where a product is stored.
    in_stream = model.dtype == "float16"
    stream = x.astype(np.float32) if in_stream else x
    scale = 1.0 if in_stream else None
    products = {heads: drawn(rows, sum(heads.rows)) for heads in config.heads}
    results = {heads: drawn(rows, heads.rows[0]) for heads in config.heads}
    inner = drawn(rows, config.intermediate_size)
    ids = xp.zeros(rows, np.int32)
    logits = drawn(rows, config.vocab_size)
    slots = cache.allocator.num_blocks * cache.allocator.block_size

    def weighted(
        name: str, of: Any, given: Array, residual: Array | None = None, **options: object
    ) -> DecodeCall:
        moved = _nbytes(of.weight, of.bias, given, residual)
        out = rows * len(of.weight) // (2 if "glu" in str(options.get("activation")) else 1)
        if residual is not None:
            options["residual"] = residual
        return DecodeCall(name, moved + out * kind.itemsize, partial(of, given, **options))

    def norm(name: str, of: Any, given: Array = x, **options: object) -> DecodeCall:
        moved = _nbytes(of.weight, of.bias, given, x if given is stream else given)
        return DecodeCall(name, moved, partial(of, given, **options))

    def of_sum(of: Any, inner: Any = None) -> DecodeCall:
        """Return the call of a norm that reads the hidden states, whose term `inner` normalises."""
        if not in_stream:
            return norm("norm", of)
        moved = _nbytes(of.weight, of.bias, x, stream, stream, x)
        options = {} if inner is None else {"x_norm": inner.rms}
        return DecodeCall("sum + norm", moved, partial(of, x, residual=stream, **options))

    def added(name: str, of: Any, after: Any, given: Array) -> list[DecodeCall]:
        """Return the calls of `cupyattn.models.forward.added`."""
        if in_stream:
            return [weighted(name, of, given)]
        if after is None:
            return [weighted(f"{name} + residual", of, given, x)]
        total = DecodeCall("sum", 3 * x.nbytes, partial(xp.add, x, x, out=x.copy()))
        return [weighted(name, of, given), norm("norm", after), total]

    parts = [
        DecodeCall("embedding", x.nbytes + stream.nbytes,
                   partial(cupyattn.embedding, weights.embedding, ids, scale=scale))
    ]  # fmt: skip
    if config.embedding_scale is not None and not in_stream:
        multiplied = partial(xp.multiply, x, config.embedding_scale, out=x.copy())
        parts.append(DecodeCall("scale of embeddings", 2 * x.nbytes, multiplied))
    if weights.positions is not None:
        at = tables.positions[:rows]
        found = partial(cupyattn.embedding, weights.positions, at, scale=scale)
        summed = partial(xp.add, stream, stream, out=stream.copy())
        parts += [
            DecodeCall("embedding", x.nbytes + stream.nbytes, found),
            DecodeCall("sum of embeddings", 3 * stream.nbytes, summed),
        ]
    for index, layer in enumerate(weights.layers):
        heads, tables_of = config.heads_of(index), model.rotary_of(index)
        qkv, seen = products[heads], results[heads]
        q, k, v = heads_of(heads, qkv)
        given = append_options(tables_of, q, layer.q_norm, layer.k_norm)
        kept = cache.k[index], cache.v[index], *cache.scales(index).values()
        cached = rows * _nbytes(*kept) // slots  # a token
        attention = []
        if layer.v_eps is not None:
            values = partial(heads_with_values, heads, layer, qkv)
            attention.append(DecodeCall("norm of values", 2 * v.nbytes, values))
        attention += [
            DecodeCall("rotary + append", 2 * qkv.nbytes,
                       partial(cache.append, index, k, v, tables, **given)),
            DecodeCall("attention", cached * context + 2 * q.nbytes,
                       partial(cache.attend, index, q[:, None], tables,
                               **model.attention_options(index))),
        ]  # fmt: skip
        output = added("output", layer.output, layer.output_norm, seen)
        if in_stream and layer.mlp_norm is None:
            output = [weighted("output + down", layer.output, seen, x)]
        down = added("down", layer.down, layer.down_norm, inner)
        if layer.scalar is not None:
            term = Term(x, layer.scales.after_down) if in_stream else None
            by = partial(scaled, stream.copy(), term, layer.scalar)
            down.append(DecodeCall("scalar of the layer", 2 * stream.nbytes, by))
        before = weights.layers[index - 1].down_norm
        parts.append(of_sum(layer.norm, before) if index else norm("norm", layer.norm, stream))
        if layer.qkv_up is not None:
            both = drawn(rows, len(layer.qkv_up.weight))[:, len(layer.qkv.weight) :]
            activation = partial(activated, both, config.activation)
            parts += [
                weighted("qkv and up", layer.qkv_up, x),
                DecodeCall("activation", both.nbytes + inner.nbytes, activation),
                *(*down, *attention, *output),
            ]
            continue
        parts.append(weighted("qkv", layer.qkv, x))
        up = weighted("up + activation", layer.up, x, activation=config.activation)
        if layer.mlp_norm is None:
            parts += [up, *down, *attention, *output]
        else:
            middle = of_sum(layer.mlp_norm, layer.output_norm)
            parts += [*attention, *output, middle, up, *down]
    draw = partial(cupyattn.sample, logits, seed=None, temperature=0, out=ids)
    return [
        *parts,
        of_sum(weights.norm, weights.layers[-1].down_norm),
        weighted("head", weights.head, x),
        DecodeCall("sample", logits.nbytes, draw),
    ]


def time_parts(parts: list[DecodeCall], xp: ModuleType, runs: int) -> list[list[float]]:
    """Return the seconds of each part, in each of the runs of all of them in their order.

    The GPU is kept busy by copies while a run is queued: so its calls follow one another as in a
    graph, and nothing is in a cache that the step itself does not leave there. The events between
    them take about a microsecond each, which is part of a part's time.
    """
    source = xp.zeros(_STALL_BYTES, np.uint8)
    target = xp.empty_like(source)
    found = []
    for _ in range(runs + 1):
        events = [xp.cuda.Event() for _ in range(len(parts) + 1)]
        for _ in range(4 + len(parts) // 8):  # 0.5 ms or more each; a call is queued in 20 us
            target.data.copy_from_device_async(source.data, source.nbytes)
        events[0].record()
        results = []
        for part, event in zip(parts, events[1:], strict=True):
            results.append(part.call())
            event.record()
        events[-1].synchronize()
        del results
        found.append([xp.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairwise(events)])
    return [list(times) for times in zip(*found[1:], strict=True)]


def summary(parts: list[DecodeCall], seconds: list[list[float]], gb_per_s: float) -> list[Json]:
    """Return calls, bytes and seconds of each name, and of all calls; a T4's time is modelled.

    On a T4 a call is assumed to last what it lasts here beyond its bytes at this GPU's rate, and
    its bytes at 320 GB/s.
    """
    rows: dict[str, Json] = {}
    for part, runs in zip(parts, seconds, strict=True):
        beyond = max(0.0, statistics.median(runs) - part.bytes / gb_per_s / 1e9)
        for name in (part.name, _ALL):
            empty: Json = {"part": name, "calls": 0, "bytes": 0, "t4_s": 0.0}
            row = rows.setdefault(name, {**empty, "seconds": [0.0] * len(runs)})
            row["calls"] += 1
            row["bytes"] += part.bytes
            row["seconds"] = [one + more for one, more in zip(row["seconds"], runs, strict=True)]
            row["t4_s"] += beyond + part.bytes / T4_GB_PER_S / 1e9
    return [*(row for row in rows.values() if row["part"] != _ALL), rows[_ALL]]


def _nbytes(*arrays: Array | None) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def rows(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
    """Measure every model: generations, then the parts of a step."""
    sizes = _sizes(arguments)
    with progress("timing", len(arguments.model) * len(sizes)) as step:
        for name in arguments.model:
            folder = None if name in models.PRESETS else name
            make = models.load if folder else models.random
            kept = {"quantize": arguments.quantize, "activations": arguments.activations}
            model = make(name, dtype=arguments.dtype, **kept, xp=harness.xp)
            model.config = model.config._replace(eos_ids=())  # every prompt gets all its tokens
            labels = {"model": name, "dtype": model.dtype, **kept}
            for size in sizes:
                of_size = {**labels, **size._asdict()}
                yield from _generations(model, folder, size, of_size, arguments, harness)
                yield from _parts(model, size, of_size, arguments, harness)
                step(f"{name}, batch {size.batch}")
            del model
            harness.free()


def _generations(
    model: models.Model, folder: str | None, size: PromptSize, labels: Json,
    arguments: argparse.Namespace, harness: Harness,
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of this library's generation, then of the other libraries'."""
    for who in (None, *harness.baselines):
        implementation = BASELINES[who] if who else OWN
        try:
            harness.require_time_for(who)
            if who is None:
                generate = own(model, size, block_size=arguments.block_size)
            else:
                generate = baseline(who, model, folder)
            found = timed(generate, size, model.config.vocab_size, arguments.runs)
        except Exception as failure:  # whatever another library raises
            if who is None:
                raise
            yield without({**labels, "operation": "new token"}, implementation, failure)
            continue
        also = {"tokens_per_s": found["tokens_per_s"]}
        if who is None:
            also["weights_mb"] = model.nbytes / 1e6
        given: Keywords = {"ceiling": COPY, "ceilings": harness.ceilings}
        first = {**labels, "operation": "first token"}
        yield row_of(first, implementation, found["first_s"], flops=None)
        token = {**labels, "operation": "new token"}
        yield row_of(
            token, implementation, found["step_s"], calls_per_sample=size.new - 1,
            bytes=model.nbytes, also=also, **given,
        )  # fmt: skip


def _parts(
    model: models.Model, size: PromptSize, labels: Json, arguments: argparse.Namespace,
    harness: Harness,
) -> Iterator[Row]:  # fmt: skip
    """Time the kernels of a step in the middle of the generation; the last row is all of them."""
    parts = _parts_of(model, size, arguments.block_size)
    copied = harness.ceilings[COPY] or T4_GB_PER_S
    for part in summary(parts, time_parts(parts, model.xp, arguments.runs), copied):
        also = {"calls": part["calls"], "t4_s": part["t4_s"]}
        if part["part"] == _ALL:
            also["t4_tokens_per_s"] = size.batch / part["t4_s"]
        yield row_of(
            {**labels, "operation": part["part"]}, OWN, part["seconds"], bytes=part["bytes"],
            ceiling=COPY, ceilings=harness.ceilings, also=also,
        )  # fmt: skip


def _parts_of(model: models.Model, size: PromptSize, block_size: int) -> list[DecodeCall]:
    context = size.prompt + size.new // 2
    lengths = [context] * size.batch
    cache = models.Generator(
        model, lengths=lengths, max_batch=size.batch, block_size=block_size
    ).cache
    sequences = [cache.allocator.add([number] * context) for number in range(size.batch)]
    return parts_of(model, cache, cache.step_tables(sequences), context)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the parts of a step and the bytes of each, which are the least that a T4 takes."""
    for name, size in product(arguments.model, _sizes(arguments)):
        model = _unfilled(name, arguments)
        kept = {"quantize": arguments.quantize, "activations": arguments.activations}
        labels = {"model": name, "dtype": model.dtype, **kept}
        parts = _parts_of(model, size, arguments.block_size)
        for part in summary(parts, [[0.0]] * len(parts), T4_GB_PER_S):
            also = {"calls": part["calls"]}
            if part["part"] == _ALL:
                also["tokens_per_s"] = size.batch / part["t4_s"]
            yield {
                **labels, **size._asdict(), "operation": part["part"], "implementation": OWN,
                "times": {"p50_s": part["t4_s"]}, "bytes": part["bytes"], "also": also,
            }  # fmt: skip


def _unfilled(name: str, arguments: argparse.Namespace) -> models.Model:
    """Return a model on NumPy arrays, that of a preset without numbers in its weights."""
    dtype, quantize, activations = arguments.dtype, arguments.quantize, arguments.activations
    if name not in models.PRESETS:
        return models.load(name, dtype=dtype, quantize=quantize, activations=activations, xp=np)
    config = models.PRESETS[name]
    weights = empty(config, dtype, np, quantises_to(quantize), activations)
    return models.Model(config, weights, dtype, np)


def _sizes(arguments: argparse.Namespace) -> list[PromptSize]:
    return [
        PromptSize(each["batch"], each["prompt"], arguments.new_tokens)
        for each in every(arguments, "prompt", "batch")
    ]


BENCHMARK = Benchmark(
    name="generate",
    title="Generating",
    help="tokens a second of language models, and the kernels of a step, on a GPU",
    description="Generate greedily with whole models, and time each kernel of a step of decoding "
    "with the bytes that it moves; then the same model by other libraries.",
    note="first token: until every prompt has one; new token: a step after it, whose bytes are "
    "the weights; then the kernels of one step, between which events take about 1 us. "
    "t4_s is MODELLED: what a call lasts "
    f"beyond its bytes here, and its bytes at {T4_GB_PER_S:.0f} GB/s; without a GPU these alone, "
    "the least that it takes.",
    options=(
        Option("model", ["gpt2", "llama-3.2-1b", "phi-2"], "random weights of these shapes "
               f"({', '.join(models.PRESETS)}), or folders and files", str, metavar="MODEL",
               alias="random"),
        Option("prompt", [128], "tokens of each prompt"),
        Option("batch", [1, 32], "prompts at a time"),
        Option("new-tokens", 128, "new tokens of each prompt", integer(2)),
        Option("dtype", "float16", "dtype of the weights", choices=("float16", "float32")),
        Option("quantize", None, "storage of the layers' weights, otherwise dtype",
               choices=QUANTIZE),
        Option("activations", None, "with quantize int8, int8 x int8 where there are many rows",
               choices=("int8",)),
        Option("block-size", 16, "tokens of a block of the cache", integer(16)),
        Option("runs", 5, "runs after a first one"),
        Option("modelled", False, "the bytes of a step and a T4's time, as without a GPU"),
    ),
    rows=rows,
    modelled=modelled,
    baselines=GENERATING,
    quick={"runs": 2, "limit": 30.0},
)  # fmt: skip
