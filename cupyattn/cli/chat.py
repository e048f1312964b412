"""``python -m cupyattn chat``: a talk with a model that was trained on chats."""

from __future__ import annotations

import argparse
import re
import sys

from cupyattn import models
from cupyattn.cli.arguments import Commands, integer
from cupyattn.cli.models import (
    MODEL_FAILURES,
    TimedPieces,
    add_drawing_arguments,
    add_model_arguments,
    drawing_of,
    loaded,
)
from cupyattn.cli.terminal import fail, paragraphs, terminal_width

ASKS = "> "
_HELP = (
    "/reset starts a new conversation, /quit or Ctrl-D ends the chat, Ctrl-C ends an answer, /help "
    "shows this."
)


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "chat",
        help="talk to a language model",
        description="Talk to a model that has a chat template. Keys and values of the conversation "
        "stay in the cache, so that an answer begins with the new words alone.",
        epilog=f"A line is a message. {_HELP}",
    )
    add_model_arguments(parser)
    add_drawing_arguments(parser, new_tokens=512)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--context",
        type=integer(16),
        default=4096,
        metavar="N",
        help="most tokens of the conversation (default: %(default)s, or the model's limit)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.model is None:
        arguments.parser.error("pass MODEL")
    try:
        model = loaded(arguments)
        talk = Talk(model, arguments)
        if sys.stdin.isatty():
            _note(_HELP)
        while (message := _next_line()) not in (None, "/quit"):
            if message == "/reset":
                talk.reset()
                _note("a new conversation: all messages are forgotten")
            elif message == "/help":
                _note(_HELP)
            elif re.fullmatch(r"/\w+", message):
                _note(f"there is no command {message}; {_HELP}")
            elif message:
                talk.answer(message)
    except MODEL_FAILURES as failure:
        fail("chat", failure, as_json=False)
        return 1
    return 0


class Talk:
    """A conversation, and the generator whose cache has its tokens."""

    def __init__(self, model: models.Model, arguments: argparse.Namespace) -> None:
        self._model = model
        self._options = drawing_of(arguments)
        self._system = arguments.system
        self._most = min(arguments.context, model.config.max_positions)
        self._generator = models.Generator(
            model, lengths=[self._most], max_batch=1, cache_dtype=arguments.cache_dtype,
            lookup=arguments.lookup,
        )  # fmt: skip
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all messages."""
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def answer(self, message: str) -> None:
        """Print the model's answer as it comes."""
        self._messages.append({"role": "user", "content": message})
        prompt = self._prompt()
        if len(prompt.ids) > self._most:
            self._messages.pop()
            print(
                f"the message has {len(prompt.ids)} tokens, and the conversation at most "
                f"{self._most}; shorten it, or pass a larger --context",
                file=sys.stderr,
            )
            return
        left = self._most - len(prompt.ids) + 1
        options = {**self._options, "max_new_tokens": min(self._options["max_new_tokens"], left)}
        timed = TimedPieces(self._generator, prompt, **options)
        pieces = []
        try:
            for piece in timed.pieces():
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" ...", end="")
        print()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        if sys.stdout.isatty() and (rate := timed.result()["tokens_per_s"]):
            print(f"({rate:,.0f} tokens/s)", file=sys.stderr)

    def _prompt(self) -> models.Prompt:
        """Return the prompt of the conversation, without the first messages if it is too long."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ValueError("there is no tokenizer among the model's files; a talk needs one")
        first = int(self._system is not None)
        while True:
            text = tokenizer.apply_chat_template(self._messages)
            ids = tokenizer.encode(text, special_tokens=False)
            if len(ids) + self._most // 4 <= self._most or len(self._messages) <= first + 1:
                break
            del self._messages[first : first + 2]
        return models.Prompt(tuple(ids), is_text=True)


def _note(text: str) -> None:
    """Print a line about the chat, not of it."""
    print("\n".join(paragraphs(text, terminal_width())), file=sys.stderr)


def _next_line() -> str | None:
    try:
        return input(ASKS if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
