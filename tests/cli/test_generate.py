"""``python -m cupyattn generate`` and ``chat``: text as it comes, times, memory, failures."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from support.tiny_models import TINY, ByteTokenizer

from cupyattn import models
from cupyattn.cli import main


@pytest.fixture
def model(monkeypatch):
    """Let `load` and random models of any name return a tiny model."""
    tiny = models.random(
        TINY["llama"]._replace(vocab_size=260, max_positions=200), dtype="float32", xp=np, seed=3
    )
    tiny.tokenizer = ByteTokenizer(begin=256)
    monkeypatch.setattr(models, "load", lambda path, **options: tiny)
    monkeypatch.setattr(models, "random", lambda name, **options: tiny)
    return tiny


def test_the_text_comes_behind_the_prompt(model, capsys):
    assert main(["generate", "folder", "Once", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr().out
    (text,) = model.generate("Once", max_new_tokens=9)
    assert printed.startswith(f"Once{text}\n\nfolder, float32, on the CPU, by NumPy\n")
    assert "5 of the prompt, 9 new ones" in printed
    assert "tokens/s" in printed
    assert "weights 153.2 kB, cache 8.2 kB" in printed


def test_options_are_passed_on(model, capsys):
    given = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.001",
             "--repetition-penalty", "1.1", "--seed", "5", "--max-new-tokens", "30"]  # fmt: skip
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.001,
               "repetition_penalty": 1.1, "seed": 5, "max_new_tokens": 30}  # fmt: skip
    (text,) = model.generate("Once", **options)
    at = next(at for at in range(2, len(text)) if text[at : at + 2].isascii())
    for stop in ([], ["--stop", text[at : at + 2]]):
        assert main(["generate", "folder", "Once", *given, *stop, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["result"] == (text[:at] if stop else text)
        assert result["seed"] == 5
        assert result["weights_bytes"] == model.nbytes
        assert result["first_token_s"] > 0
    assert main(["generate", "folder", "Once", "--lookup", "3", "--cache-dtype", "int8"]) == 0


def test_how_weights_are_kept_is_passed_on_and_told(model, monkeypatch, capsys):
    asked = []

    def noted(name, **options):
        asked.append((name, options["quantize"], options["activations"]))
        return model

    monkeypatch.setattr(models, "load", noted)
    monkeypatch.setattr(models, "random", noted)
    once = ["--max-new-tokens", "1"]
    assert main(["generate", "folder", "Once", "--quantize", "file", *once]) == 0
    assert "folder, float32, layers in the file's blocks, on the CPU" in capsys.readouterr().out
    assert main(["generate", "--random", "gpt2", "--quantize", "nf4", *once]) == 0
    assert "gpt2, float32, layers in nf4, on the CPU" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    both = ["--quantize", "int8", "--activations", "int8"]
    assert main(["chat", "folder", "--quantize", "int8"]) == 0
    assert main(["generate", "folder", "Once", *both, *once]) == 0
    assert "folder, float32, layers in int8 x int8, on the CPU" in capsys.readouterr().out
    own = [("file", None), ("nf4", None), ("int8", None), ("int8", "int8")]
    names = ("folder", "gpt2", "folder", "folder")
    assert asked == [(name, *each) for name, each in zip(names, own, strict=True)]
    with pytest.raises(SystemExit):
        main(["generate", "folder", "Once", "--quantize", "int2"])
    assert "quantize = 'int2'; weights are quantised to " in capsys.readouterr().err


def test_random_weights_need_no_text(model, capsys):
    assert main(["generate", "--random", "gpt2", "--prompt-tokens", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == "gpt2"
    assert (result["prompt_tokens"], result["new_tokens"]) == (20, 128)
    assert len(result["result"]) == 128
    assert main(["generate", "--random", "gpt2", "--max-new-tokens", "1"]) == 0
    assert "no other" in capsys.readouterr().out


@pytest.mark.parametrize("given", [[], ["folder"], ["folder", "Once", "--random", "gpt2"]])
def test_a_model_and_a_prompt_are_needed(given, capsys):
    with pytest.raises(SystemExit):
        main(["generate", *given])
    assert "pass MODEL and PROMPT, or --random alone" in capsys.readouterr().err


def test_a_missing_folder_is_named(capsys):
    for command, *text in (("generate", "Once"), ("chat",)):
        assert main([command, "no-such-folder", *text]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"{command}: there is no 'no-such-folder'" in printed.err


def test_options_that_are_refused_are_said(model, capsys):
    assert main(["generate", "folder", "Once", "--temperature", "-1"]) == 1
    assert "generate: got temperature = -1" in capsys.readouterr().err
    model.tokenizer = None
    assert main(["generate", "folder", "Once"]) == 1
    assert "no tokenizer" in capsys.readouterr().err


def say(monkeypatch, capsys, lines, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = main(["chat", "folder", "--max-new-tokens", "6", *options])
    return code, capsys.readouterr()


def answers(model, *said, system=None):
    """The model's answers, each to the whole conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    for text in said:
        messages.append({"role": "user", "content": text})
        written = model.tokenizer.apply_chat_template(messages)
        prompt = models.Prompt(tuple(written.encode()), is_text=True)
        (answer,) = model.generate([prompt], max_new_tokens=6)
        messages.append({"role": "assistant", "content": answer})
    return [each["content"] for each in messages if each["role"] == "assistant"]


def test_a_talk_goes_on(model, monkeypatch, capsys):
    """Each answer follows from the whole conversation, until it starts over."""
    code, printed = say(monkeypatch, capsys, ["Hi", "", "Why?", "/reset", "Hi"], "--system", "Be")
    assert code == 0
    wanted = answers(model, "Hi", "Why?", system="Be")
    assert printed.out == "".join(f"{answer}\n" for answer in (*wanted, wanted[0]))


def test_a_long_talk_forgets_what_was_said_first(model, monkeypatch, capsys):
    code, printed = say(monkeypatch, capsys, [f"line {n}" for n in range(12)], "--context", "64")
    assert code == 0, printed.err
    long = ["word " * 40, "Hi"]  # the talk goes on without it
    code, printed = say(monkeypatch, capsys, long, "--context", "64")
    assert code == 0
    assert "the message has" in printed.err
    assert printed.out == answers(model, "Hi")[0] + "\n"


def test_commands_of_a_talk_are_not_messages(model, monkeypatch, capsys):
    given = ["/help", "Hi", "/reset", "/rest", "/quit", "never read"]
    code, printed = say(monkeypatch, capsys, given)
    assert code == 0
    assert printed.out == answers(model, "Hi")[0] + "\n"
    told = " ".join(printed.err.split())
    assert told.count("/reset starts a new conversation, /quit or Ctrl-D ends the chat") == 2
    assert "all messages are forgotten" in told
    assert "there is no command /rest; " in told
