"""``python -m cupyattn profile``: the figures of the report, per source line."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product

import pytest
from support.search import deep, mostly_deep

import cupyattn
from cupyattn.cli import main
from cupyattn.cli.profile import SHOWN_LINES, busy_cycles, instruction_at, source_of
from cupyattn.emulator import OutOfBoundsError
from cupyattn.emulator.report import LineReport
from cupyattn.runtime.source import source_root

SMALL = ("--implementation", "tiled", "--seqlen", "40", "--heads", "1")


def profiled(capsys, *arguments: str) -> dict:
    assert main(["profile", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.nvrtc
def test_lines_add_up_to_the_totals(capsys):
    result = profiled(capsys, "attention", "--head-dim", "24", "--causal", *SMALL)
    assert result["call"].startswith("Causal attention (tiled) of 1 x 40 tokens, 1 query heads")
    (kernel,) = result["kernels"]
    assert kernel["kernel"] == "attention_tiled"
    totals, lines = result["totals"], kernel["lines"]
    assert totals == {name: kernel[name] for name in totals}
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
@pytest.mark.parametrize("call", ["attention", *deep("attention_backward")])
def test_a_line_is_named_with_its_source(call, capsys):
    tiled = SMALL if call == "attention" else ("--seqlen", "16", "--heads", "1")
    kernels = profiled(capsys, call, *tiled)["kernels"]
    lines = [line for kernel in kernels for line in kernel["lines"]]
    for line in lines:
        text = (source_root() / line["file"]).read_text().splitlines()[line["line"] - 1]
        assert line["source"] == text.strip() != ""


@pytest.mark.nvrtc
def test_a_line_of_what_is_included_too(capsys):
    result = profiled(capsys, "softmax", "--rows", "3", "--length", "40")
    for line in result["kernels"][0]["lines"]:
        text = (source_root() / line["file"]).read_text().splitlines()[line["line"] - 1]
        assert line["source"] == text.strip()
    names = {line["file"] for line in result["kernels"][0]["lines"]}
    assert {"softmax/forward.cu", "common/vec.cuh"} <= names


@pytest.mark.usefixtures("default_architecture")
@pytest.mark.nvrtc
def test_inline_assembly_is_named_by_its_instruction(capsys):
    arguments = ("attention", "--seqlen", "64", "--heads", "1")
    (kernel,) = profiled(capsys, *arguments)["kernels"]
    costliest = max(kernel["lines"], key=lambda line: line["busy_cycles"])
    assert costliest["instructions"]["tensor"] > 0
    assert costliest["instruction"].startswith("mma.sync.aligned.m16n8k8.")
    loads = {
        (line["instruction"], access["instruction"])
        for line in kernel["lines"]
        for access in line["accesses"]
        if access["instruction"].startswith("ldmatrix")
    }
    assert {wrapper for wrapper, _ in loads} == {
        f"ldmatrix.sync.aligned.m8n8.x4.{layout}shared.b16" for layout in ("", "trans.")
    }
    assert all(wrapper == executed for wrapper, executed in loads)
    assert main(["profile", *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"%  {costliest['instruction']}\n" in printed
    assert costliest["source"] not in printed


def test_instruction_of_a_statement():
    source = (source_root() / "common" / "mma.cuh").read_text().splitlines()
    found = {instruction_at(tuple(source), line) for line in range(len(source) + 2)}
    wrappers = {"mma.sync", "movmatrix.sync", "ldmatrix.sync"}
    assert {name and ".".join(name.split(".")[:2]) for name in found} == {None, *wrappers}
    before_asm = ("float y;", 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "f(")
    assert [instruction_at(before_asm, line) for line in (1, 2, 3)] == [
        None,
        "ex2.approx.ftz.f32",
        None,
    ]


@pytest.mark.parametrize(
    "place", ["/elsewhere/cuda_src/attention/float32/../../common", "/a/_cuda_src/common", "common"]
)
def test_source_is_found_by_the_end_of_its_path(place):
    name, source = source_of(f"{place}/mma.cuh")
    assert name == "common/mma.cuh"
    assert bool(source) == (place != "common"), "a path is absolute"
    assert source_of("/elsewhere/kernel.cu") == ("elsewhere/kernel.cu", ())


BACKWARDS = {
    "--implementation flash": ["delta", "scales", "dkdv", "convert"],
    "--implementation flash --deterministic": ["delta", "scales", "dkdv", "dq"],
    "--bias --sinks --causal --window-size 8 none --dropout-p 0.1 --deterministic": [
        *("delta", "dsinks", "scales", "dkdv", "dq")
    ],
    "--implementation flash --dtype bfloat16": ["f32_delta", "f32_dkdv", "f32_convert"],
    "--dtype float32 --softcap 5 --sinks": ["f32_delta", "f32_dkdv", "f32_dsinks"],
    "--implementation naive --causal": ["naive"],
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("options", mostly_deep(BACKWARDS, [*BACKWARDS][2:3]))
def test_each_kernel_of_the_backward(options, capsys):
    size = ("--seqlen", "24", "--heads", "1", "--head-dim", "16")
    result = profiled(capsys, "attention_backward", *size, *options.split())
    names = [kernel["kernel"] for kernel in result["kernels"]]
    assert sorted(names) == sorted(f"attention_backward_{name}" for name in BACKWARDS[options])
    totals = result["totals"]
    for name in ("busy_cycles", "diverged_steps", "atomic_updates"):
        assert sum(each[name] for each in result["kernels"]) == pytest.approx(totals[name])
    mix = sum((Counter(each["instructions"]) for each in result["kernels"]), Counter())
    assert mix == totals["instructions"]
    assert main(["profile", "attention_backward", *size, *options.split()]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}, " in printed and f"\n{name}: the " in printed for name in names)


@pytest.mark.usefixtures("default_architecture")
@pytest.mark.nvrtc
def test_text(capsys):
    assert main(["profile", "attention", *SMALL]) == 0
    short = capsys.readouterr().out
    assert main(["profile", "attention", *SMALL, "--all-lines"]) == 0
    long = capsys.readouterr().out
    assert f"attention_tiled: the {SHOWN_LINES} costliest of" in short
    place = re.compile(r"^ {10}[\w/]+\.cuh?:\d+: ", re.MULTILINE)
    assert len(place.findall(short)) == SHOWN_LINES < len(place.findall(long))
    assert "1.00 ways" in short
    assert "sectors a request, 100% needed" in " ".join(short.split())
    assert "emulated on the CPU, PTX for sm_75" in " ".join(short.split())


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
@pytest.mark.parametrize("arch", ["", "80"])
def test_the_environment_names_the_architecture(arch, monkeypatch, capsys):
    monkeypatch.setenv("CUPYATTN_ARCH", arch)
    result = profiled(capsys, "softmax", "--rows", "3", "--length", "40")
    assert result["arch"] == f"sm_{arch or 75}"


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
PLAIN = [
    ("flash", "--window-size none 3"),
    *(("tiled", each) for each in ("--causal", "--sinks --softcap 5 --causal")),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize("options", mostly_deep(OPTIONS, ["--bias"]))
def test_options_of_attention_backward(options, monkeypatch, capsys):
    """The forward, which the reference runs, and the backward are given the same."""
    given = {}

    def spy(name, function):
        def spying(*arrays, **options):
            given[name] = options
            return function(*arrays, **options)

        return spying

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(cupyattn, name, spy(name, getattr(cupyattn, name)))
    arguments = ["attention_backward", "--seqlen", "24", "--head-dim", "16", *options.split()]
    profiled(capsys, *arguments)
    forward, backward = given["attention"], given["attention_backward"]
    assert backward.pop("implementation") == "flash"
    assert forward.pop("return_lse") is True
    assert forward.keys() == backward.keys()
    assert all(forward[name] is backward[name] for name in forward)
    assert {k: getattr(v, "shape", v) for k, v in backward.items()} == OPTIONS[options]


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("implementation", "options"), mostly_deep(product(("flash", "tiled"), OPTIONS), PLAIN)
)
def test_options_of_attention(implementation, options, monkeypatch, capsys):
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
    assert main(["profile", "attention_backward", "--implementation", "tiled"]) == 1
    assert "kernels are 'flash' and 'naive'" in capsys.readouterr().err
    assert main(["profile", "attention", "--dropout-p", "1.5"]) == 1
    assert "dropout_p = 1.5; it is at least 0 and below 1" in capsys.readouterr().err


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
