"""``python -m cupyattn generate``: a model continues a text, which is printed as it comes."""

from __future__ import annotations

import argparse

import numpy as np

from cupyattn import models
from cupyattn.cli.arguments import Commands, add_json_option, integer
from cupyattn.cli.models import (
    MODEL_FAILURES,
    TimedPieces,
    add_drawing_arguments,
    add_model_arguments,
    device_name,
    drawing_of,
    loaded,
    memory_of,
    show_times,
)
from cupyattn.cli.terminal import Result, Terminal, emit, fail

_IN_WORDS = {"file": "the file's blocks"}


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a language model",
        description="Continue a text with GPT-2, Llama, Mistral, Ministral, Qwen2 or 3, SmolLM2 or "
        "3, Gemma 2, 3 or 4, or Phi-2, 3 or 4 on the GPU, or in NumPy if there is none. The text "
        "is printed as it is generated; then tokens a second, the time to the first token and "
        "memory.",
        epilog="python -m cupyattn generate smollm2 'The capital of France is'",
    )
    add_model_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "--random",
        choices=tuple(models.PRESETS),
        metavar="NAME",
        help="instead of MODEL and PROMPT: these shapes with random weights, and a random prompt; "
        f"one of {', '.join(models.PRESETS)}",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=integer(1),
        default=128,
        metavar="N",
        help="of a random prompt (default: %(default)s)",
    )
    add_drawing_arguments(parser, new_tokens=128)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    given = arguments.model is not None and arguments.prompt is not None
    alone = arguments.model is None and arguments.prompt is None
    if not (given if arguments.random is None else alone):
        arguments.parser.error("pass MODEL and PROMPT, or --random alone")
    try:
        model, prompt = _model_and_prompt(arguments)
        options = {**drawing_of(arguments), "stop": arguments.stop}
        generator = models.Generator(
            model, lengths=[len(prompt.ids) + arguments.max_new_tokens], max_batch=1,
            cache_dtype=arguments.cache_dtype, lookup=arguments.lookup,
        )  # fmt: skip
        timed = TimedPieces(generator, prompt, **options)
        if prompt.is_text and not arguments.json:
            print(arguments.prompt, end="", flush=True)
        for piece in timed.pieces():
            if isinstance(piece, str) and not arguments.json:
                print(piece, end="", flush=True)
    except MODEL_FAILURES as failure:
        fail("generate", failure, as_json=arguments.json)
        return 1
    result = {
        "command": "generate",
        "model": arguments.random or arguments.model,
        "dtype": model.dtype,
        "quantize": arguments.quantize,
        "activations": arguments.activations,
        "device": device_name(model),
        "result": timed.generation.results[0],
        "seed": timed.generation.seed,
        **timed.result(),
        **memory_of(model, generator),
    }
    if prompt.is_text and not arguments.json:
        print("\n")
    emit(result, show, as_json=arguments.json)
    return 0


def _model_and_prompt(arguments: argparse.Namespace) -> tuple[models.Model, models.Prompt]:
    if arguments.random is None:
        model = loaded(arguments)
        if model.tokenizer is None:
            raise ValueError("there is no tokenizer among the model's files; text needs one")
        return model, models.Prompt(tuple(model.tokenizer.encode(arguments.prompt)), is_text=True)
    xp = np if arguments.cpu else None
    kept = {"quantize": arguments.quantize, "activations": arguments.activations}
    model = models.random(arguments.random, dtype=arguments.dtype, **kept, xp=xp)
    drawn = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.prompt_tokens)
    return model, models.Prompt(tuple(drawn.tolist()))


def show(result: Result, terminal: Terminal) -> None:
    """Print how fast it was."""
    quantize = result["quantize"]
    rows = f" x {result['activations']}" if result["activations"] else ""
    kept = f", layers in {_IN_WORDS.get(quantize, quantize)}{rows}" if quantize else ""
    terminal.title(f"{result['model']}, {result['dtype']}{kept}, on {result['device']}")
    show_times(result, terminal)
