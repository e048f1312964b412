"""``python -m cupyattn profile``: the figures of the report, per source line."""

from __future__ import annotations

import json
from collections import Counter

import pytest

import cupyattn
from cupyattn.cli import main
from cupyattn.cli.profile import SHOWN_LINES, busy_cycles
from cupyattn.emulator import OutOfBoundsError
from cupyattn.emulator.report import LineReport
from cupyattn.kernels.source import source_root

SMALL = ("--implementation", "tiled", "--seqlen", "40", "--heads", "1")


def profiled(capsys, *arguments: str) -> dict:
    assert main(["profile", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.nvrtc
def test_lines_add_up_to_the_totals(capsys):
    result = profiled(capsys, "attention", "--head-dim", "24", "--causal", *SMALL)
    assert result["call"].startswith("Causal attention (tiled) of 1 x 40 tokens, 1 query heads")
    totals, lines = result["totals"], result["lines"]
    mix: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for line in lines:
        mix.update(line["instructions"])
        for access in line["accesses"]:
            moved[f"{access['space']} {'store' if access['write'] else 'load'}"] += access["bytes"]
    assert mix == totals["instructions"]
    assert moved == totals["bytes"]
    assert sum(line["busy_cycles"] for line in lines) == pytest.approx(totals["busy_cycles"])
    # out in float16 and lse in float32
    assert totals["bytes"]["global store"] == 40 * 24 * 2 + 40 * 4


@pytest.mark.nvrtc
def test_a_line_is_named_with_its_source(capsys):
    result = profiled(capsys, "attention", *SMALL)
    for line in result["lines"]:
        text = (source_root() / line["file"]).read_text().splitlines()[line["line"] - 1]
        assert line["source"] == text.strip()
    names = {line["file"] for line in result["lines"]}
    assert {"attention/tiled.cu", "common/vec.cuh"} <= names


@pytest.mark.nvrtc
def test_text(capsys):
    assert main(["profile", "attention", *SMALL]) == 0
    short = capsys.readouterr().out
    assert main(["profile", "attention", *SMALL, "--all-lines"]) == 0
    long = capsys.readouterr().out
    assert f"The {SHOWN_LINES} costliest of" in short
    assert short.count(".cu:") + short.count(".cuh:") == SHOWN_LINES
    assert long.count(".cu:") + long.count(".cuh:") > SHOWN_LINES
    assert "1.00 ways" in short
    assert "sectors a request, 100% needed" in short
    assert "emulated on the CPU, PTX for sm_75" in short


@pytest.mark.nvrtc
@pytest.mark.parametrize("backward", [(), ("--backward",)])
def test_softmax(backward, capsys):
    result = profiled(capsys, "softmax", "--rows", "3", "--length", "40", *backward)
    arrays_read = 2 if backward else 1
    assert result["totals"]["bytes"] == {
        "global load": arrays_read * 3 * 40 * 2,
        "global store": 3 * 40 * 2,
    }


@pytest.mark.nvrtc
def test_bfloat16_and_grouped_heads(capsys):
    options = ("--dtype", "bfloat16", "--heads", "2", "--kv-heads", "1", "--seqlen", "8")
    result = profiled(capsys, "attention", "--implementation", "tiled", *options)
    assert "2 query heads on 1 key-value heads, head dim 64, bfloat16" in result["call"]


# What is asked for by option, and how cupyattn.attention has to be called then.
OPTIONS = {
    "--causal": {"causal": True},
    "--window-size 16 0": {"window_size": (16, 0)},
    "--window-size none 3": {"window_size": (None, 3)},
    "--softcap 30": {"softcap": 30.0},
    "--dropout-p 0.1": {"dropout_p": 0.1, "seed": 0},
    "--dropout-p 0.1 --seed 7": {"dropout_p": 0.1, "seed": 7},
    "--mask": {"mask": (1, 1, 24, 24)},
    "--bias": {"bias": (1, 2, 24, 24)},
    "--alibi-slopes": {"alibi_slopes": (2,)},
    "--sinks": {"sinks": (2,)},
    "--sinks --softcap 5 --causal": {"sinks": (2,), "softcap": 5.0, "causal": True},
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("implementation", ["flash", "tiled"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_attention(options, implementation, monkeypatch, capsys):
    """They reach the library by the same names, arrays in shapes that broadcast to the scores."""
    given = {}
    attention = cupyattn.attention

    def spy(*arrays, **options):
        given.update(options)
        return attention(*arrays, **options)

    monkeypatch.setattr("cupyattn.attention", spy)
    arguments = ["attention", "--seqlen", "24", "--head-dim", "16", *options.split()]
    code = main(["profile", *arguments, "--implementation", implementation, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert given.pop("implementation") == implementation
    assert given.pop("return_lse")
    assert {k: getattr(v, "shape", v) for k, v in given.items()} == OPTIONS[options]
    if code:  # a kernel without the option says so
        assert implementation in result["error"]
        return
    assert result["totals"]["busy_cycles"] > 0
    for name in given.keys() - {"causal"}:
        assert name in result["call"]


@pytest.mark.nvrtc
def test_the_window_is_in_the_profile(capsys):
    """A narrow window skips tiles: fewer matrix products."""
    size = ("--seqlen", "256", "--heads", "1")
    whole = profiled(capsys, "attention", *size)
    narrow = profiled(capsys, "attention", *size, "--window-size", "16", "0")
    tensor = [result["totals"]["instructions"]["tensor"] for result in (whole, narrow)]
    assert tensor[1] < 0.7 * tensor[0]


@pytest.mark.parametrize(
    "wrong", [("--window-size", "3"), ("--window-size", "-1", "0"), ("--softcap", "much")]
)
def test_wrong_options(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["profile", "attention", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.nvrtc
def test_a_call_that_is_wrong_says_so(capsys):
    assert main(["profile", "attention", "--heads", "3", "--kv-heads", "2", "--json"]) == 1
    assert "heads" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.nvrtc
def test_a_fault_is_reported(monkeypatch, capsys):
    def faulty(*_, **__):
        raise OutOfBoundsError("planted")

    monkeypatch.setattr("cupyattn.softmax", faulty)
    assert main(["profile", "softmax"]) == 1
    assert capsys.readouterr().err == "profile: planted\n"


def test_busy_cycles_of_arithmetic():
    line = LineReport("k.cu", 1, Counter(fma=4, xu=1, tensor=3, move=100), [])
    assert busy_cycles(line) == 4 * 0.5 + 1 * 2.0 + 3 * 2.0
