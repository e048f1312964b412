"""``python -m cupyattn merge``: write a model with its adapters merged."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import numpy as np

from cupyattn import models
from cupyattn.cli.arguments import Commands, add_json_option
from cupyattn.cli.models import MODEL_FAILURES, MODEL_HELP, add_quantize_option, say_size
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.models.checkpoints.hugging_face import read_object
from cupyattn.models.checkpoints.writing import source_of, write_folder
from cupyattn.models.loading import DTYPES, opened
from cupyattn.models.training import LoraAdapters
from cupyattn.runtime.errors import error, explaining, size_text


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "merge",
        help="write a model with its adapters merged into the weights",
        description="Add LoRA adapters to the weights of their model, and write it to a separate "
        "folder of safetensors, which transformers reads too. Quantised weights are decoded, and "
        "results are rounded once.",
        epilog="python -m cupyattn merge FOLDER finetuned --out merged",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("adapters", metavar="ADAPTERS", help="as finetune or PEFT writes them")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the model is written"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="KIND",
        help="dtype to write; by default that of config.json, and for a GGUF file float16 on a GPU "
        f"or float32 on a CPU ({', '.join(DTYPES)})",
    )
    add_quantize_option(
        parser, "format in which the adapters were trained; floats are written anyway"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="compute in NumPy, even if there is a GPU"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        result = _merged(arguments)
    except (*MODEL_FAILURES, TypeError) as failure:
        fail("merge", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def _merged(arguments: argparse.Namespace) -> Result:
    out = arguments.out
    source = source_of(opened(arguments.model))
    if (out / "config.json").exists():
        raise error(
            FileExistsError,
            f"--out {out} has a config.json: it is a model already",
            "a merged model is written to a separate folder",
            "pass another --out",
        )
    model = models.load(
        arguments.model,
        dtype=arguments.dtype or _dtype_of(source),
        quantize=arguments.quantize,
        activations=arguments.activations,
        xp=np if arguments.cpu else None,
    )
    merged = LoraAdapters.load(model, arguments.adapters, base_model=arguments.model).merged()
    say_size(merged, out)
    with explaining(
        f"--out {out} could not be written",
        "a merged model is a separate folder, complete once it has a config.json",
        "make room there, or pass another --out",
    ):
        write_folder(merged.weights, merged.config, source, out, merged.tokenizer)
    return {
        "command": "merge",
        "model": arguments.model,
        "adapters": arguments.adapters,
        "out": str(out),
        "dtype": merged.dtype,
        "bytes": merged.nbytes,
        "generate": shlex.join(["python", "-m", "cupyattn", "generate", str(out), "..."]),
    }


def _dtype_of(source: Path | None) -> str | None:
    if source is None:
        return None
    given = read_object(source / "config.json")
    named = given.get("dtype", given.get("torch_dtype"))
    return named if named in DTYPES else None


def show(result: Result, terminal: Terminal) -> None:
    """Print where it is, and how to try it."""
    terminal.title(f"{result['model']} with {result['adapters']} in its weights")
    terminal.facts({"weights": f"{size_text(result['bytes'])} in {result['dtype']}"})
    terminal.text(f"The model is in {result['out']}. To try it:")
    terminal.command(result["generate"])
