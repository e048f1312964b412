"""``python -m cupyattn.benchmark generate``: whole models, and the kernels of a step, on a GPU.

Its measure is the memory's speed: a step of decoding reads all weights once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyattn import models
from cupyattn.benchmark.cuda_events import copy_rate, measured_on
from cupyattn.benchmark.generate.parts import T4_GB_PER_S, parts_of, summary, time_parts
from cupyattn.benchmark.generate.peers import PEERS, peer
from cupyattn.benchmark.generate.runs import Size, equal_share, own, timed
from cupyattn.benchmark.gpu_command import run_on_gpu, show_machine
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.models.quantised import QUANTIZE

OWN = "cupyattn"


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "generate",
        help="tokens a second of GPT-2, Llama and Phi-2, and the kernels of a step, on a GPU",
        description="Generate greedily with whole models, and time each kernel of a step of "
        "decoding beside the bytes that it moves; then the same weights by others, where they are "
        "installed. Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="Exit code 1 without a GPU.",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(models.PRESETS),
        metavar="MODEL",
        help="random weights of these shapes, or folders and files "
        f"(default: {' '.join(models.PRESETS)})",
    )
    for name, default, what in (
        ("prompt", [128], "tokens of each prompt"),
        ("batch", [1, 32], "prompts at a time"),
    ):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=integer(1),
            default=default,
            metavar="N",
            help=f"{what} (default: {' '.join(map(str, default))})",
        )
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
        "--peer", nargs="+", choices=PEERS, default=[], help="who else, with the same weights"
    )
    parser.add_argument(
        "--runs",
        type=integer(1),
        default=5,
        metavar="N",
        help="runs behind a first one, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE too, as one JSON object"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("generate", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every model on the first GPU."""
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        copied = copy_rate(30, 5)
        measured = [
            model_rows(name, arguments, copied, cupy, time_parts) for name in arguments.model
        ]
    return {
        "command": "generate",
        **measured_on(device),
        "copy_gb_per_s": copied,
        "new_tokens": arguments.new_tokens,
        "runs": arguments.runs,
        "models": measured,
    }


def model_rows(
    name: str, arguments: argparse.Namespace, copied: float, xp: Any, timer: Any
) -> dict[str, Any]:
    """Return a model's ``rows``, one for each size and whoever generates, and its ``parts``."""
    folder = None if name in models.PRESETS else name
    if folder is None:
        model = models.random(name, dtype=arguments.dtype, quantize=arguments.quantize, xp=xp)
    else:
        model = models.load(folder, dtype=arguments.dtype, quantize=arguments.quantize, xp=xp)
    model.config = model.config._replace(eos_ids=())  # as many tokens for everyone
    rows, parts = [], []
    for prompt in arguments.prompt:
        for batch in arguments.batch:
            size = Size(batch, prompt, arguments.new_tokens)
            parts.append({**size._asdict(), "parts": _parts(model, size, arguments, copied, timer)})
            rows += _rows(model, folder, size, arguments)
    weights = model.nbytes
    return {"model": name, "dtype": model.dtype, "quantize": arguments.quantize,
            "weights_bytes": weights, "rows": rows, "steps": parts}  # fmt: skip


def _rows(
    model: models.Model, folder: str | None, size: Size, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time this library's generation, then the peers'."""
    rows: list[dict[str, Any]] = []
    wanted: list[list[int]] = []
    for who in (OWN, *arguments.peer):
        row: dict[str, Any] = {**size._asdict(), "by": who}
        try:
            if who == OWN:
                generate = own(model, size, block_size=arguments.block_size)
            else:
                generate = peer(who, model, folder, size)
            row |= timed(generate, size, model.config.vocab_size, arguments.runs)
        except Exception as failure:  # whatever another library raises
            if who == OWN:
                raise
            rows.append({**row, "refused": f"{type(failure).__name__}: {failure}"})
            continue
        tokens = row.pop("tokens")
        wanted = wanted or tokens
        rows.append({**row, "equal": equal_share(tokens, wanted)})
    return rows


def _parts(
    model: models.Model, size: Size, arguments: argparse.Namespace, copied: float, timer: Any
) -> list[dict[str, Any]]:
    """Time the kernels of a step in the middle of the generation."""
    context = size.prompt + size.new // 2
    generator = models.Generator(
        model, lengths=[context] * size.batch, max_batch=size.batch,
        block_size=arguments.block_size,
    )  # fmt: skip
    cache = generator.cache
    sequences = [cache.allocator.add([number] * context) for number in range(size.batch)]
    parts = parts_of(model, cache, cache.step_tables(sequences), context)
    found = summary(parts, timer(parts, model.xp, arguments.runs), copied)
    for sequence in sequences:
        sequence.free()
    return found


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Generating", result, terminal)
    copied = result["copy_gb_per_s"]
    terminal.facts({"a copy on the device": f"{copied:.0f} GB/s"})
    for model in result["models"]:
        weights = model["weights_bytes"]
        kept = f", layers in {model['quantize']}" if model["quantize"] else ""
        terminal.title(
            f"{model['model']}, {model['dtype']}{kept}: {weights / 1e6:,.0f} MB of weights, which "
            f"memory reads {copied * 1e9 / weights:,.0f} times a second here, and "
            f"{T4_GB_PER_S * 1e9 / weights:,.0f} times on a T4"
        )
        terminal.table(
            ("by", "batch", "prompt", "first token", "tokens/s", "of the limit", "equal tokens"),
            [_row(row, weights, copied) for row in model["rows"]],
        )
        for row in model["rows"]:
            if "refused" in row:
                terminal.text(f"  {row['by']}: {row['refused']}")
        for step in model["steps"]:
            _show_step(model, step, terminal)
    terminal.text(
        f"  Medians of {result['runs']} runs behind a first one; {result['new_tokens']} new tokens "
        "a prompt, tokens/s of all but the first. The limit is reading the weights once a step, at "
        "the copy's rate; equal tokens are those before the first that differs."
    )


def _row(row: dict[str, Any], weights: int, copied: float) -> tuple[str, ...]:
    size = (str(row["batch"]), str(row["prompt"]))
    if "refused" in row:
        return (row["by"], *size, "none", "none", "", "")
    limit = row["batch"] * copied * 1e9 / weights
    rate = row["tokens_per_s"]
    return (
        row["by"],
        *size,
        f"{row['first_s'] * 1e3:.1f} ms",
        f"{rate:,.0f}",
        f"{rate / limit:.2f}",
        f"{row['equal']:.0%}",
    )


def _show_step(model: dict[str, Any], step: dict[str, Any], terminal: Terminal) -> None:
    parts = step["parts"]
    total = {key: sum(part[key] for part in parts) for key in ("calls", "bytes", "seconds", "t4_s")}
    terminal.title(
        f"A step of {model['model']}, batch {step['batch']}, "
        f"{step['prompt'] + step['new'] // 2} tokens each"
    )
    terminal.table(
        ("part", "calls", "MB", "us", "of the limit", "us on a T4, modelled"),
        [
            (
                part["part"],
                part["calls"],
                f"{part['bytes'] / 1e6:.2f}",
                f"{part['seconds'] * 1e6:.1f}",
                f"{part['share']:.2f}",
                f"{part['t4_s'] * 1e6:.0f}",
            )
            for part in (*parts, {**total, "part": "all", "share": _share(parts)})
        ],
    )
    rate, on_t4 = (step["batch"] / total[key] for key in ("seconds", "t4_s"))
    terminal.text(
        f"  That is {rate:,.0f} tokens/s here; events between the calls take about 1 us of each. "
        f"On a T4 {on_t4:,.0f} tokens/s, MODELLED: what a call lasts beyond its bytes here, and "
        f"its bytes at {T4_GB_PER_S:.0f} GB/s."
    )


def _share(parts: list[dict[str, Any]]) -> float:
    """Return the share of the limit of all parts together."""
    return sum(part["share"] * part["seconds"] for part in parts) / sum(
        part["seconds"] for part in parts
    )
