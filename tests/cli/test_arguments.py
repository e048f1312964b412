"""The command line itself: help, wrong arguments, interrupts; and ``python -m cupyattn info``."""

from __future__ import annotations

import json

import pytest
from support.processes import run
from support.search import Search, deep

import cupyattn
from cupyattn.__main__ import main
from cupyattn.cli import INTERRUPTED, compile, demo, finetune, generate
from cupyattn.cli.configurations import compiled_kernel
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.folders import cache_directory

COMMANDS = (
    "demo", "generate", "chat", "finetune", "merge", "info", "compile", "profile", "turing",
    "tune", "report",
)  # fmt: skip
CALLS = ("attention", "attention_backward", "softmax")


# The modules of CuPy and NVRTC are not found: the base install.
BASE_INSTALL = (
    "import sys; sys.modules['cupy'] = sys.modules['cuda.pathfinder'] = None; import runpy; "
    "sys.argv[0] = 'cupyattn'; runpy.run_module('cupyattn', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("arguments", "lists"), [((), COMMANDS), (("profile",), CALLS)], ids=["bare", "profile"]
)
def test_what_names_no_command_prints_help(arguments, lists, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert set(lists) <= set(printed.out.split())


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS), *(("profile", call) for call in CALLS)]
)
def test_help_at_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--help"])
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m cupyattn {' '.join(command)}".rstrip())
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("profle",), "invalid choice: 'profle'"),
        (("demo", "--seqlen", "0"), "0 is not 1 or more"),
        (("demo", "--head-dim", "0"), "0 is not 1 to 512"),
        (("demo", "--head-dim", "513"), "513 is not 1 to 512"),
        (("demo", "--head-dim", "x"), "'x' is not an integer"),
        (("demo", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("compile", "--arch", "70"), "choose from 75, "),
        (("compile", "--jobs", "-1"), "-1 is not 1 or more"),
        (("compile", "--head-dim", "64", "600"), "600 is not 1 to 512"),
        (("compile", "--kernel", "attention_foward"), "near it are attention_forward, "),
        (("compile", "--kernel", "dbias"), "near it are attention_backward_"),
        (("turing", "--kernel", "gemm"), "no kernel 'gemm'; `python -m cupyattn info` lists them"),
        (("turing", "--head-dim", "0"), "0 is not 1 to 512"),
        (("profile", "attention", "--head-dim", "600"), "600 is not 1 to 512"),
        (("profile", "attention", "--softcap", "much"), "invalid float value: 'much'"),
        (("generate", "m", "--quantize", "nf5"), "quantised to 'nf4', 'int4', 'int8', 'file'; "),
        *(
            (
                (*command, "m", "d", "--quantize", "nf4_nested"),
                "only files of bitsandbytes have this format",
            )
            for command in (("generate",), ("finetune",), ("merge", "--out", "o"))
        ),
        (("info", "more"), "unrecognized arguments: more"),
    ],
)
def test_wrong_arguments(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err.replace("'75'", "75")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("generate m --cpu p", {"model": "m", "prompt": "p", "cpu": True}),
        ("generate m p --quantize nf4", {"model": "m", "prompt": "p", "quantize": "nf4"}),
        ("generate m --cpu -- -p", {"model": "m", "prompt": "-p", "cpu": True}),
        ("generate --random gpt2", {"model": None, "prompt": None, "random": "gpt2"}),
        ("finetune m --lora-rank 4 d", {"model": "m", "data": "d", "lora_rank": 4}),
    ],
)
def test_options_stand_anywhere(command, found, monkeypatch):
    given = []
    for module in (generate, finetune):
        monkeypatch.setattr(module, "run", lambda arguments: given.append(vars(arguments)) or 0)
    assert main(command.split()) == 0
    assert given[0].items() >= found.items()


@pytest.mark.parametrize("command", ["compile", *deep("turing", "profile attention")])
def test_without_nvrtc_a_command_says_what_to_install(command):
    result = run(*command.split(), "--json", launcher=("-c", BASE_INSTALL))
    assert result.returncode == 1
    assert "pip install 'cupyattn[emulator]'" in json.loads(result.stdout)["error"]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["demo --seqlen 8", *deep("info")])
def test_without_nvrtc_there_is_numpy(command):
    result = run(*command.split(), launcher=("-c", BASE_INSTALL))
    assert result.returncode == 0, result.stderr
    assert "no GPU" in result.stdout


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="a process reads the variables of a GPU once")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("CUPYATTN_ARCH", "abc"), ("CUPYATTN_TENSOR_CORES", "yes"), ("CUPYATTN_TUNED", "abc")],
)
def test_commands_refuse_a_wrong_variable(variable, value, monkeypatch, capsys):
    monkeypatch.setenv(variable, value)
    for command in ("info", "demo", "profile attention", "compile"):
        if (variable, command) == ("CUPYATTN_TENSOR_CORES", "compile"):
            continue  # which compiles the kernels of both
        if (variable, command) == ("CUPYATTN_ARCH", "demo") and not Search.deep:
            continue  # which compiles kernels before it looks
        assert main([*command.split(), "--json"]) == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert error.startswith(f"{variable}={value!r}; ")


@pytest.mark.parametrize("module", [demo, compile])
def test_interrupted(module, monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupt)
    assert main([module.__name__.rpartition(".")[-1]]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_info_json_is_device_info():
    result = run("info", "--json")
    assert result.returncode == 0
    assert result.stderr == ""
    info = json.loads(result.stdout)
    expected = cupyattn.device_info()
    assert set(info) == {"command", *expected} | {"version"}
    assert set(info["kernels"]) == set(expected["kernels"])
    same = set(expected) - {"kernels", "cache"}  # the cache may grow beside this test
    assert {name: info[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.nvrtc
def test_info_counts_compiled_kernels(empty_cache, capsys):
    assert main(["info", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["kernels"].values()) == {0}
    compiled_kernel(softmax.FORWARD.specialise(75, "float32", 100, 1), TURING)
    assert main(["info", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert kernels["softmax_forward"] == 1
    assert sum(kernels.values()) == 1


def test_info_text(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"cupyattn {cupyattn.__version__}" in printed
    assert "attention_tiled" in printed
    assert str(cache_directory()) in printed
    if not device_count():
        assert "no GPU" in printed


def test_info_says_where_nothing_is_kept(empty_cache, monkeypatch, capsys):
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(empty_cache / "file" / "below"))
    empty_cache.mkdir()
    (empty_cache / "file").touch()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert main(["info"]) == 0
    assert "cache: none, compiled kernels stay in memory" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launcher", [("-m", "cupyattn", "demo"), ("-m", "cupyattn.benchmark", "host")]
)
def test_an_architecture_that_the_device_cannot_run(launcher):
    result = run(launcher=launcher, env={"CUPYATTN_ARCH": "121"})
    assert result.returncode == 1
    assert "CUPYATTN_ARCH" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_info_says_why_a_device_cannot_be_used():
    if cuda_device(0).capability >= 121:
        pytest.skip("no known architecture is above this device's")
    result = run("--json", launcher=("-m", "cupyattn", "info"), env={"CUPYATTN_ARCH": "121"})
    (device, *_) = json.loads(result.stdout)["devices"]
    assert "CUPYATTN_ARCH=121 on a device" in device["unusable_because"]
    assert device["arch"] is None
