"""``python -m cupyattn finetune``: adapters of a model, or all of it, learn from a file of text.

One training at a time writes to a folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path

from cupyattn import models
from cupyattn.cli.arguments import Commands, add_json_option, integer, positive
from cupyattn.cli.models import MODEL_FAILURES, MODEL_HELP, add_quantize_option
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.cli.training_run import forms_text, planned, prepared, trained
from cupyattn.models.loading import DTYPES, OF_THE_FILE
from cupyattn.models.training.optimizer import SCHEDULES, STATES
from cupyattn.runtime.errors import error, explaining, size_text

_NAME = ".training"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other trainings out of a folder, which is made if need be, until the block is left.

    The lock is the system's, on a file in the folder: whose process has ended, however it did,
    holds none.

    Raises FileExistsError if another training has it; OSError if the folder cannot be made, or
    written to.
    """
    path, made = folder / _NAME, False
    try:
        with _writing(folder):
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        with _locked(path) as file:
            try:
                with _writing(folder):
                    file.truncate(0)
                    file.write(str(os.getpid()).encode())
                yield
            finally:
                with suppress(OSError):  # Windows keeps open files: an unlocked one is no harm
                    path.unlink()
    finally:
        if made:
            with suppress(OSError):  # it is not empty: something was written
                folder.rmdir()


def _writing(folder: Path) -> AbstractContextManager[None]:
    return explaining(
        f"--out {folder}",
        "a training writes its checkpoints and its losses there",
        "make room, or pass an --out that can be written",
    )


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    while True:
        with path.open("a+b", buffering=0) as file:  # or closing would write again
            if not _lock(file):
                raise _taken(path)
            if not _is_still(path, file):
                continue  # its owner removed it between opening and locking
            yield file
            return


def _is_still(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    _BEHIND_ALL = 1 << 30  # locked bytes cannot be read, and the number must be

    def _lock(file: FileIO) -> bool:
        file.seek(_BEHIND_ALL)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(file: FileIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _taken(path: Path) -> FileExistsError:
    number = path.read_bytes()[:20].decode("ascii", "replace") or "one that begins"
    return error(
        FileExistsError,
        f"another training writes to {path.parent} (process {number})",
        "a folder has one at a time",
        "wait until it has ended, or pass another --out",
    )


_INTERRUPTED = 130  # what shells report for SIGINT
_NUMBERS = (
    ("lora-rank", integer(1), 16, "rank of the adapters"),
    ("lora-alpha", float, 32.0, "the adapters' output is scaled by alpha / rank"),
    ("lora-dropout", float, 0.0, "share of the adapters' inputs that a step leaves out"),
    ("batch-tokens", integer(2), 2048, "tokens of a batch, in which short samples are packed"),
    ("max-length", integer(2), None, "tokens of a sample (default: those of a batch)"),
    ("accumulate", integer(1), 1, "batches of a step"),
    ("epochs", integer(1), 3, "how often each sample is seen"),
    (
        "steps",
        integer(1),
        None,
        "in the place of --epochs: how many steps are taken, all of which "
        "the learning rate falls over: --resume takes no other number",
    ),
    ("lr", float, None, "the highest learning rate (default: 2e-4, with --full 2e-5)"),
    ("warmup", integer(0), None, "steps in which it rises (default: a twentieth of all)"),
    ("weight-decay", float, 0.0, "of matrices, decoupled"),
    ("clip", float, 1.0, "the largest norm of all gradients"),
    ("eval-fraction", float, 0.0, "share of the samples for evaluation, which are not learnt"),
    ("save-every", integer(1), 200, "steps from checkpoint to checkpoint"),
    ("seed", integer(0), 0, "of the data's order, of dropout and of the first adapters"),
)
_CHOICES = (
    ("dtype", DTYPES, None, "of weights; by default float16 on a GPU, otherwise float32"),
    ("schedule", SCHEDULES, "cosine", "how the learning rate falls"),
    ("optimizer-state", STATES, "float32", "dtype of AdamW's running means"),
)


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "finetune",
        help="train a model's adapters, or all of it, on a file of text",
        description="Train LoRA adapters of a language model, or with --full all weights. DATA has "
        "a JSON object on each line, or is one array of objects: {\"text\": ...}, "
        "{\"prompt\": ..., \"completion\": ...}, of which the prompt is not learnt, or a "
        "chat, of which the assistant's answers are: {\"messages\": [...]}, Alpaca's "
        "{\"instruction\": ..., \"input\": ..., \"output\": ...}, ShareGPT's "
        "{\"conversations\": [...]}. The same call gives the same losses, bit for bit, also where "
        "it was interrupted and resumed.",
        epilog="python -m cupyattn finetune FOLDER data.jsonl --lora-rank 16 --quantize nf4",
    )  # fmt: skip
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=MODEL_HELP,
    )  # fmt: skip
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="a file of JSON lines, or of one array"
    )
    parser.add_argument(
        "--dry-run", action="store_true",
        help="only print the memory that it would take on a GPU, line by line; needs no DATA",
    )  # fmt: skip
    parser.add_argument(
        "--random",
        choices=tuple(models.PRESETS),
        metavar="NAME",
        help=f"with --dry-run: shapes instead of MODEL; one of {', '.join(models.PRESETS)}",
    )
    parser.add_argument(
        "--memory-gb", type=positive, metavar="GB",
        help="free memory of the GPU (default: from the driver)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("finetuned"), metavar="DIR",
        help="where adapters, checkpoints and losses go (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--full",
        action="store_true",
        help="train all weights, without adapters; they are written as a folder of safetensors",
    )
    parser.add_argument(
        "--lora-targets", nargs="+", default=["all-linear"], metavar="NAME",
        help="modules that have adapters, such as q_proj v_proj (default: all linear layers)",
    )  # fmt: skip
    add_quantize_option(parser, "storage format of frozen weights")
    for name, kinds, chosen, what in _CHOICES:
        default_text = f" (default: {chosen})" if chosen else ""
        parser.add_argument(
            f"--{name}", choices=kinds, default=chosen, metavar="KIND",
            help=f"{what}: {', '.join(kinds)}{default_text}",
        )  # fmt: skip
    for name, kind, default, what in _NUMBERS:
        default_text = "" if default is None else " (default: %(default)s)"
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=what + default_text
        )
    parser.add_argument("--resume", action="store_true", help="go on from DIR's newest checkpoint")
    parser.add_argument(
        "--cpu", action="store_true", help="compute in NumPy, even if there is a GPU"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.full and arguments.quantize:
        arguments.parser.error("--full trains all weights, and --quantize freezes them: leave one")
    named, random = arguments.model is not None, arguments.random is not None
    if random and not arguments.dry_run:
        arguments.parser.error("--random has no text to learn: it is for --dry-run")
    if random and named:
        arguments.parser.error("--random replaces MODEL, and a dry run reads no DATA: leave out "
                               f"{arguments.model}")  # fmt: skip
    if random and arguments.quantize == OF_THE_FILE:
        arguments.parser.error("--random has no file: pass --quantize nf4, int4 or int8")
    if not (named or random if arguments.dry_run else named and arguments.data):
        arguments.parser.error("pass MODEL and DATA, or --dry-run with MODEL or --random")
    try:
        if arguments.dry_run:
            budget = planned(arguments)
            emit(budget, show_budget, as_json=arguments.json)
            return 0 if budget["fits"] is not False else 1
        with claimed(arguments.out):
            result = trained(prepared(arguments), arguments)
    except MODEL_FAILURES as failure:
        fail("finetune", failure, as_json=arguments.json)
        return 1
    result["resume"] = _again()
    emit(result, show, as_json=arguments.json)
    return 0 if result["finished"] else _INTERRUPTED


def _again() -> str:
    """Return the command that resumes an interrupted training."""
    given = [each for each in sys.argv[1:] if each != "--resume"]
    return shlex.join(["python", "-m", "cupyattn", *given, "--resume"])


def show_budget(result: Result, terminal: Terminal) -> None:
    """Print a budget line by line, and whether there is room for it."""
    terminal.title(f"{result['model']}, {result['batch_tokens']:,} tokens a batch, on a GPU")
    facts = {line["what"]: size_text(line["bytes"]) for line in result["lines"]}
    facts["total"] = size_text(result["total_bytes"])
    terminal.facts(facts)
    terminal.text(
        "  The inputs of all layers are kept, and what is between them is computed again. The "
        f"working set holds one layer; cross entropy has {size_text(result['logits_bytes'])} of "
        "logits in its place, and its line is what it takes beyond that. There has to be an eighth "
        "more than the total for the memory pool."
    )
    if result["fits"] is None:
        terminal.text("  There is no GPU here: pass the memory of one as --memory-gb.")
    else:
        fits = f"it fits: {size_text(result['free_bytes'])} are free"
        terminal.verdict(result["fits"], f"  {fits if result['fits'] else result['would']}")


def show(result: Result, terminal: Terminal) -> None:
    """Print the outcome, and what to do next."""
    terminal.title(f"{result['model']} fine-tuned on {result['device']}")
    skipped = f", {result['skipped']} of them skipped" if result["skipped"] else ""
    facts = {
        "data": forms_text(result["data"]),
        "learnt": f"{result['learnt']:,} numbers",
        "steps": f"{result['steps']} of {result['of_steps']}{skipped}",
        "loss": f"{_loss(result['first_loss'])} at first, {_loss(result['last_loss'])} at last",
    }
    if result["eval_losses"]:
        looked_at = result["eval_losses"]
        facts["held back"] = f"loss {_loss(looked_at[0])} at first, {_loss(looked_at[-1])} at last"
    if result["tokens_per_s"]:
        facts["speed"] = f"{result['tokens_per_s']:,.1f} tokens/s"
    if result["memory_bytes"]:
        facts["memory"] = size_text(result["memory_bytes"])
    facts["losses"] = ", ".join(filter(None, (result["losses"], result["curve"])))
    terminal.facts(facts)
    if not result["finished"]:
        terminal.text("It was interrupted after a checkpoint. To resume:")
    elif result["adapters"]:
        terminal.text(f"The adapters are in {result['out']}. To try them:")
    else:
        terminal.text(f"The model is in {result['out']}. To try it:")
    terminal.command(result["generate"] if result["finished"] else result["resume"])


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
