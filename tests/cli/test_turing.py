"""``python -m cupyattn turing``: which rows it models, what it prints, when it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cupyattn.cli import main, turing
from cupyattn.cli.configurations import head_dim_of, row_name
from cupyattn.registry import catalogue
from cupyattn.turing import MACHINES, DisassemblerError, KernelFigures, LoopFigures, Utilisation

LOOP = LoopFigures(
    start=0x110,
    end=0x680,
    work_pipe="tensor",
    work=8,
    instructions=38,
    skipped=4,
    counts={"tensor": 8, "LDL": 3},
    narrow_global=0,
    spill_bytes=12,
    cycles={"tensor": 512.0, "lsu": 640.0},
    work_cycles=512.0,
    work_flop=131_072.0,
    utilisation=Utilisation(0.625, 0.5, 0.75),
)
MASKED = LoopFigures(0, 0x100, "tensor", 8, 77, 0, {}, 0, 99, {"tensor": 1.0, "lsu": 2.0}, 1.0, 1.0)
PRODUCTS = KernelFigures(255, 32_768, 2, (MASKED, LOOP))
machines: list[str] = []


@pytest.fixture
def modelled(monkeypatch):
    """The command with a model that has its figures ready; gives what it was asked."""
    asked = []
    machines.clear()

    def analyse(specialisation, *, simulate, machine):
        asked.append((specialisation, simulate))
        machines.append(machine.name)
        return PRODUCTS if specialisation.spec.entry != "softmax_forward" else NO_PRODUCTS

    monkeypatch.setattr(turing, "analyse", analyse)
    monkeypatch.setattr(turing, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(turing, "disassembler_version", lambda: "13.5.37")
    return asked


NO_PRODUCTS = KernelFigures(45, 0, 8, ())


def output(capsys, *arguments: str) -> str:
    assert main(["turing", *arguments]) == 0
    return capsys.readouterr().out


def test_rows_are_those_of_the_tuned_kernels(modelled, capsys):
    output(capsys)
    tuned = [each for each in catalogue() if each.spec.entry in turing.TUNED]
    assert modelled == [(each, True) for each in tuned]


def test_rows_of_a_kernel_and_a_head_dim(modelled, capsys):
    output(capsys, "--kernel", "attention_tiled", "--head-dim", "128", "--no-simulation")
    assert {each.spec.entry for each, _ in modelled} == {"attention_tiled"}
    assert {head_dim_of(each) for each, _ in modelled} == {128}
    assert {simulate for _, simulate in modelled} == {False}


def test_several_kernels_and_head_dims(modelled, capsys):
    asked = ("--kernel", "attention_forward", "attention_backward_dq", "--head-dim", "64", "72")
    printed = output(capsys, *asked)
    chosen = {(each.spec.entry, head_dim_of(each)) for each, _ in modelled}
    assert chosen == {("attention_forward", 64), ("attention_backward_dq", 64)}
    assert "no row has head dim 72: it is compiled at its first call" in printed


def test_json_has_the_main_loop(modelled, capsys):
    result = json.loads(output(capsys, "--head-dim", "96", "--json"))
    assert (result["command"], result["arch"]) == ("turing", "sm_75")
    assert (result["nvrtc"], result["nvdisasm"]) == ("12.9", "13.5.37")
    row = result["rows"][0]
    assert (row["kernel"], row["row"]) == ("attention_forward", "D 96")
    assert (row["registers"], row["shared_bytes"], row["ctas_per_sm"]) == (255, 32_768, 2)
    assert "loops" not in row
    main_loop = row["main"]
    assert main_loop["spill_bytes"] == 12, "not of the loop over masked tiles"
    assert main_loop["lsu_ratio"] == 1.25
    assert (main_loop["bound"], main_loop["binding_pipe"]) == (0.8, "lsu")
    assert main_loop["utilisation"] == {"mean": 0.625, "low": 0.5, "high": 0.75}
    held = main_loop["sustained"]
    assert held["clock_mhz"] == 1590, "a loop that takes no energy"
    assert (held["tflops"], held["uncertainty"]) == pytest.approx((10.176, 2.035), abs=1e-3)
    assert 0 < held["watts"] < 70


def test_all_loops(modelled, capsys):
    forward = ("--kernel", "attention_forward", "--head-dim", "96", "--all-loops")
    (row, *_) = json.loads(output(capsys, *forward, "--json"))["rows"]
    assert [loop["spill_bytes"] for loop in row["loops"]] == [99, 12]
    assert row["loops"][0]["utilisation"] is None
    printed = output(capsys, *forward).splitlines()
    assert sum(line.startswith("  D 96  ") for line in printed) == 2


def test_text(modelled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = output(capsys, "--head-dim", "96")
    line = next(line for line in printed.splitlines() if line.startswith("  D 96  "))
    cells = "D 96 255 32768 2 38 12 1.25 0.80 lsu 0.625 0.50-0.75 10.2 10+-2"
    assert line.split() == cells.split()
    assert "NVRTC 12.9, nvdisasm 13.5.37" in printed
    assert "a model with an error of up to +-0.05" in " ".join(printed.split())


def test_long_names_leave_room_for_utilisation_and_rates(modelled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    kernels = ("attention_backward_dkdv", "linear_product", "matmul_s8")
    printed = output(capsys, "--kernel", *kernels)
    headings = [line.split() for line in printed.splitlines() if line.startswith("  row ")]
    assert [heading[-3:] for heading in headings] == [["used", "TFLOP/s", "sustained"]] * 3


def test_a_sustained_rate_is_rounded_once(modelled, capsys, monkeypatch):
    """16.51 is 17, not 16 by way of 16.5."""
    monkeypatch.setenv("COLUMNS", "120")
    loop = replace(LOOP, work_flop=LOOP.work_flop * 16.51 / 10.176)
    monkeypatch.setattr(turing, "analyse", lambda *_, **__: replace(PRODUCTS, loops=(loop,)))
    assert " 17+-3" in output(capsys, "--kernel", "attention_forward", "--head-dim", "96")


def test_rates_of_integers_are_tops(modelled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    integers = replace(LOOP, work_flop=2 * LOOP.work_flop, of_integers=True)
    monkeypatch.setattr(
        turing, "analyse", lambda *_, **__: replace(PRODUCTS, loops=(MASKED, integers))
    )
    printed = output(capsys, "--head-dim", "96")
    line = next(line for line in printed.splitlines() if line.startswith("  D 96  "))
    assert line.split()[-4:] == ["0.50-0.75", "20.4", "TOPS", "20+-4"]
    (row, *_) = json.loads(output(capsys, "--head-dim", "96", "--json"))["rows"]
    assert (row["main"]["of_integers"], row["main"]["tflops"]) == (True, 20.4)


def test_long_names_are_written_shorter():
    long = "256 x 192, scalar loads, W_LINES=kAlong, ACTIVATION=Gelu, BIAS=bfloat16, scores by 4"
    assert turing.shorter(long) == "256 x 192, scalar, W Along, Gelu, BIAS=bf16, scores x4"


def test_without_a_simulation_there_are_no_empty_columns(monkeypatch, modelled, capsys):
    assert "TFLOP/s" in output(capsys, "--head-dim", "96")
    counted = KernelFigures(255, 32_768, 2, (replace(LOOP, utilisation=None),))
    monkeypatch.setattr(turing, "analyse", lambda row, *, simulate, machine: counted)
    printed = output(capsys, "--head-dim", "96", "--no-simulation")
    assert "TFLOP/s" not in printed
    assert "simulation" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("  D 96  "))
    assert " ".join(line.split()) == "D 96 255 32768 2 38 12 1.25 0.80 lsu"


def test_machines_by_name(modelled, capsys):
    """Their peaks are those of the specifications."""
    for name, tflops in (("T4", 10.2), ("RTX 2060 Super", 9.0), ("RTX 2080 Ti", 16.8)):
        arguments = ("--machine", name, "--head-dim", "96", "--json")
        result = json.loads(output(capsys, *arguments))
        assert result["machine"] == name
        assert set(machines) == {name}
        assert {row["main"]["tflops"] for row in result["rows"]} == {tflops}
        machines.clear()
    assert f"on Turing ({name})" in output(capsys, *arguments[:-1])
    with pytest.raises(SystemExit):
        main(["turing", "--machine", "RTX 4090"])
    assert "RTX 2080 Ti" in capsys.readouterr().err


def test_a_card_without_tensor_cores_shows_what_it_runs(modelled, capsys):
    output(capsys, "--machine", "GTX 1650 Ti", "--no-simulation")
    assert {each.spec.entry for each, _ in modelled} == set(turing.IN_FLOAT32)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_rates_of_machines(machine):
    """Half the rate on GeForce, and without tensor cores slower than float32 units."""
    hmma = machine.peak_flop_per_cycle
    specified = {"T4": 65, "RTX 2060 Super": 28.7, "RTX 2080 Ti": 53.8, "TITAN RTX": 130.5}
    if machine.name in specified:
        assert machine.tflops(hmma) == pytest.approx(specified[machine.name], rel=0.01)
    assert (machine.tflops(hmma) > machine.tflops(128)) == machine.tensor_cores


def test_a_kernel_without_products(modelled, capsys):
    printed = output(capsys, "--kernel", "softmax_forward")
    assert "no products" in printed
    result = json.loads(output(capsys, "--kernel", "softmax_forward", "--json"))
    assert {row["main"] for row in result["rows"]} == {None}


def test_a_kernel_of_which_no_cta_fits(monkeypatch, modelled, capsys):
    nothing = replace(LOOP, cycles={"tensor": 0.0, "lsu": 0.0}, work_cycles=0.0, utilisation=None)
    figures = KernelFigures(255, 70_000, 0, (nothing,))
    monkeypatch.setattr(turing, "analyse", lambda row, *, simulate, machine: figures)
    arguments = ("--kernel", "attention_forward", "--head-dim", "96")
    assert "no CTA fits" in output(capsys, *arguments)
    main_loop = json.loads(output(capsys, *arguments, "--json"))["rows"][0]["main"]
    assert (main_loop["bound"], main_loop["lsu_ratio"], main_loop["tflops"]) == (None, None, None)


@pytest.mark.parametrize("kernel", ["attention_forward", "softmax_forward"])
def test_no_row_of_a_head_dim(modelled, capsys, kernel):
    assert main(["turing", "--kernel", kernel, "--head-dim", "7", "--json"]) == 1
    printed = capsys.readouterr()
    assert (
        f"--head-dim 7; there are configurations of {kernel} for"
        in json.loads(printed.out)["error"]
    )
    assert "leave --head-dim out" in printed.err


def test_without_a_disassembler(monkeypatch, capsys):
    def absent():
        raise DisassemblerError("nvdisasm is not here")

    monkeypatch.setattr(turing, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(turing, "disassembler_version", absent)
    assert main(["turing", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "command": "turing",
        "ok": False,
        "error": "nvdisasm is not here",
    }
    assert "nvdisasm is not here" in printed.err


def test_every_row_of_the_tables_has_its_own_name():
    """But for those whose tables choose the same for two lengths."""
    names = [(each.spec.entry, row_name(each)) for each in catalogue()]
    assert len(set(names)) == len(names)
