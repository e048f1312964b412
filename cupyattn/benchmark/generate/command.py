"""``python -m cupyattn.benchmark generate``: whole models, and the kernels of a step, on a GPU.

Its measure is the memory's speed: a step of decoding reads all weights once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from cupyattn import models
from cupyattn.benchmark.frame.arguments import add_lists
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.frame.rows import COPY, Row, row_of, without
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.benchmark.generate.parts import T4_GB_PER_S, Part, parts_of, summary, time_parts
from cupyattn.benchmark.generate.peers import PEERS as OF_MODELS
from cupyattn.benchmark.generate.peers import peer
from cupyattn.benchmark.generate.runs import Size, equal_share, own, timed
from cupyattn.cli.arguments import integer
from cupyattn.models.quantised import QUANTIZE, quantises_to
from cupyattn.models.weights import empty
from cupyattn.progress import progress

OWN = "cupyattn"
_ALL = "step: all parts"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(models.PRESETS),
        metavar="MODEL",
        help="random weights of these shapes, or folders and files "
        f"(default: {' '.join(models.PRESETS)})",
    )
    lists = (
        ("prompt", [128], integer(1), "tokens of each prompt"),
        ("batch", [1, 32], integer(1), "prompts at a time"),
    )
    add_lists(parser, lists)
    parser.add_argument(
        "--new-tokens",
        type=integer(2),
        default=128,
        metavar="N",
        help="of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        default="float16",
        help="of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--quantize", choices=QUANTIZE, help="how weights of layers are kept, otherwise in dtype"
    )
    parser.add_argument(
        "--block-size",
        type=integer(16),
        default=16,
        metavar="N",
        help="tokens of a block of the cache (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=integer(1),
        default=5,
        metavar="N",
        help="runs behind a first one (default: %(default)s)",
    )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Row]:
    """Measure every model: generations, then the parts of a step."""
    sizes = _sizes(arguments)
    with progress("timing", len(arguments.model) * len(sizes)) as step:
        for name in arguments.model:
            folder = None if name in models.PRESETS else name
            make = models.load if folder else models.random
            model = make(name, dtype=arguments.dtype, quantize=arguments.quantize, xp=gauge.xp)
            model.config = model.config._replace(eos_ids=())  # as many tokens for everyone
            labels = {"model": name, "dtype": model.dtype, "quantize": arguments.quantize}
            for size in sizes:
                of_size = {**labels, **size._asdict()}
                yield from _generations(model, folder, size, of_size, arguments, gauge)
                yield from _parts(model, size, of_size, arguments, gauge)
                step(f"{name}, batch {size.batch}")
            del model
            gauge.free()


def _generations(
    model: models.Model,
    folder: str | None,
    size: Size,
    labels: dict[str, Any],
    arguments: argparse.Namespace,
    gauge: Gauge,
) -> Iterator[Row]:
    """Yield the rows of this library's generation, then of the peers'."""
    wanted: list[list[int]] = []
    for who in (None, *gauge.peers):
        contender = PEERS[who] if who else OWN
        try:
            gauge.require_time_for(who)
            if who is None:
                generate = own(model, size, block_size=arguments.block_size)
            else:
                generate = peer(who, model, folder, size)
            found = timed(generate, size, model.config.vocab_size, arguments.runs)
        except Exception as failure:  # whatever another library raises
            if who is None:
                raise
            yield without({**labels, "operation": "new token"}, contender, failure)
            continue
        wanted = wanted or found["tokens"]
        also = {name: found[name] for name in ("tokens_per_s", "cold_s", "repeats")}
        also["equal"] = equal_share(found["tokens"], wanted)
        if who is None:
            also["weights_mb"] = model.nbytes / 1e6
        given: dict[str, Any] = {"ceiling": COPY, "ceilings": gauge.ceilings}
        first = {**labels, "operation": "first token"}
        yield row_of(first, contender, found["first_s"], flops=None)
        token = {**labels, "operation": "new token"}
        yield row_of(
            token, contender, found["step_s"], calls_per_sample=size.new - 1, bytes=model.nbytes,
            also=also, **given,
        )  # fmt: skip


def _parts(
    model: models.Model,
    size: Size,
    labels: dict[str, Any],
    arguments: argparse.Namespace,
    gauge: Gauge,
) -> Iterator[Row]:
    """Time the kernels of a step in the middle of the generation; the last row is all of them."""
    parts = _parts_of(model, size, arguments)
    copied = gauge.ceilings[COPY] or T4_GB_PER_S
    found = summary(parts, time_parts(parts, model.xp, arguments.runs), copied)
    for part in (*found, _together(found)):
        also = {"calls": part["calls"], "t4_s": part["t4_s"]}
        if part["part"] == _ALL:
            also["t4_tokens_per_s"] = size.batch / part["t4_s"]
        yield row_of(
            {**labels, "operation": part["part"]}, OWN, part["seconds"], bytes=part["bytes"],
            ceiling=COPY, ceilings=gauge.ceilings, also=also,
        )  # fmt: skip


def _parts_of(model: models.Model, size: Size, arguments: argparse.Namespace) -> list[Part]:
    context = size.prompt + size.new // 2
    cache = models.Generator(
        model, lengths=[context] * size.batch, max_batch=size.batch,
        block_size=arguments.block_size,
    ).cache  # fmt: skip
    sequences = [cache.allocator.add([number] * context) for number in range(size.batch)]
    return parts_of(model, cache, cache.step_tables(sequences), context)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the parts of a step and the bytes of each, which are the least that a T4 takes."""
    for name, size in product(arguments.model, _sizes(arguments)):
        model = _unfilled(name, arguments)
        labels = {"model": name, "dtype": model.dtype, "quantize": arguments.quantize}
        parts = _parts_of(model, size, arguments)
        found = summary(parts, [[0.0]] * len(parts), T4_GB_PER_S)
        for part in (*found, _together(found)):
            also = {"calls": part["calls"]}
            if part["part"] == _ALL:
                also["tokens_per_s"] = size.batch / part["t4_s"]
            yield {
                **labels, **size._asdict(), "operation": part["part"], "contender": OWN,
                "times": {"p50_s": part["t4_s"]}, "bytes": part["bytes"], "also": also,
            }  # fmt: skip


def _unfilled(name: str, arguments: argparse.Namespace) -> models.Model:
    """Return a model on NumPy arrays, that of a preset without numbers in its weights."""
    dtype, quantize = arguments.dtype, arguments.quantize
    if name not in models.PRESETS:
        return models.load(name, dtype=dtype, quantize=quantize, xp=np)
    config = models.PRESETS[name]
    return models.Model(config, empty(config, dtype, np, quantises_to(quantize)), dtype, np)


def _sizes(arguments: argparse.Namespace) -> list[Size]:
    return [
        Size(batch, prompt, arguments.new_tokens)
        for prompt in arguments.prompt
        for batch in arguments.batch
    ]


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total = {key: sum(part[key] for part in parts) for key in ("calls", "bytes", "t4_s")}
    seconds = [sum(run) for run in zip(*(part["seconds"] for part in parts), strict=True)]
    return {"part": _ALL, **total, "seconds": seconds}


BENCHMARK = Benchmark(
    name="generate",
    title="Generating",
    help="tokens a second of GPT-2, Llama and Phi-2, and the kernels of a step, on a GPU",
    description="Generate greedily with whole models, and time each kernel of a step of decoding "
    "beside the bytes that it moves; then the same weights by others, where they are installed.",
    note="first token: until every prompt has one; new token: a step behind it, whose bytes are "
    "the weights; then the kernels of one step, between which events take about 1 us. equal: "
    "tokens before the first that differs from cupyattn's. t4_s is MODELLED: what a call lasts "
    f"beyond its bytes here, and its bytes at {T4_GB_PER_S:.0f} GB/s; without a GPU these alone, "
    "the least that it takes.",
    rows=rows,
    options=options,
    peers=OF_MODELS,
    modelled=modelled,
    quick={"runs": 2, "limit": 30.0},
    facts=lambda arguments: {"new_tokens": arguments.new_tokens, "runs": arguments.runs},
)
