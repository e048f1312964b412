"""``python -m cupyattn report``: the GPU it models, the figures of rows, and its output."""

from __future__ import annotations

import json
import threading
import types
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from support.fake_gpu import HEADER
from support.gates import require_gates_tools

from cupyattn.__main__ import main
from cupyattn.benchmark import attention, ceiling_kernels, layers, linear
from cupyattn.benchmark import command as driver
from cupyattn.benchmark import report as command
from cupyattn.benchmark.cases import Arrays, labels_of, row_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.report import PARTS, UNFILLED, TuringModel, figure, machine_of, markdown
from cupyattn.benchmark.timer import COPY, PRODUCTS
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.turing import MACHINES, T4, Sustained
from cupyattn.turing.sass import disassemble, parse_listing

ATTENTION = {
    **{"batch": 2, "heads": 16, "seqlen": 512, "head_dim": 64, "head_dim_v": 64},
    **{"dtype": "float16", "causal": False, "window": 512, "option": "plain"},
}
ATTENTION = row_of(ATTENTION, "cupyattn flash", [1e-3], flops=20e9, bytes=1e6, ceiling=PRODUCTS)
LAYER = {"operation": "softmax", "direction": "forward"}
LAYER = row_of(LAYER, "cupyattn", [1e-3], bytes=200e6, ceiling=COPY)


class Gpu:
    """A fake device."""

    ordinal, multiprocessors, tensor_cores = 0, 30, True

    def __init__(self, name: str, capability: int = 75) -> None:
        self.name, self.capability = name, capability


@pytest.fixture(autouse=True)
def attributes(monkeypatch):
    """A driver that describes a device with a bus of 192 bits at 7 GHz."""
    said = {"GlobalMemoryBusWidth": 192, "MemoryClockRate": 7_001_000, "ClockRate": 1_710_000}
    device = types.SimpleNamespace(attributes=said)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda ordinal: device))
    monkeypatch.setattr("cupyattn.turing.machine.load_cupy", lambda: cupy)
    return said


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2060 SUPER", "RTX 2060 Super"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce GTX 1650 Ti", "GTX 1650 Ti"),
    ],
)
def test_named_cards(name, machine):
    assert machine_of(Gpu(name)) is MACHINES[machine]


def test_another_turing_card_is_as_its_driver_says(attributes):
    machine = machine_of(Gpu("NVIDIA GeForce RTX 2060"))
    assert (machine.name, machine.multiprocessors) == ("NVIDIA GeForce RTX 2060", 30)
    assert (machine.clock_mhz, machine.memory_gb_s, machine.hmma_f32) == (1710, 336, 16)
    assert machine_of(Gpu("Quadro RTX 5000")).hmma_f32 == T4.hmma_f32
    without = Gpu("NVIDIA GeForce GTX 1660")
    without.tensor_cores = False
    assert not machine_of(without).tensor_cores
    attributes.clear()  # a driver that no longer tells
    assert machine_of(Gpu("Quadro RTX 5000")).memory_gb_s == T4.memory_gb_s


@pytest.fixture
def rates(monkeypatch):
    """Rates of main loops in FLOP a cycle, by what a kernel's entry holds; 512 otherwise."""
    given: dict[str, float] = {}

    def analyse(specialisation, *, machine):
        entry = specialisation.spec.entry
        rate = next((rate for part, rate in given.items() if part in entry), 512.0)
        share = 0.4 if machine.watts > 20 else 0.0
        held = Sustained(share * machine.clock_mhz / 1000, machine.watts)
        main = types.SimpleNamespace(flop_per_cycle=rate, sustained=lambda machine: held)
        return types.SimpleNamespace(main=main)

    monkeypatch.setattr("cupyattn.turing.analysis.analyse", analyse)
    return given


def figures(benchmark, *words, machine=T4, sustained=False):
    """The model's figure of each row of a benchmark, by its labels."""
    _, arguments = benchmark.parse(*words)
    cases = {json.dumps(dict(case.labels)): case for case in benchmark.cases(arguments, UNFILLED)}
    rows = [
        row_of(case.labels, each.name, [1.0], **case.work_of(each.name), ceiling=case.ceiling)
        for case in cases.values()
        for each in case.implementations
    ]
    model = TuringModel(machine)
    return [figure(row, cases, model, sustained=sustained) for row in rows]


SMALL = ("--seqlen", "512", "--batch", "2", "--head-dim", "64", "--dtype", "float16")


def test_attention_is_modelled_by_its_main_loop(rates):
    words = (*SMALL, "--implementation", "flash", "--options", "causal")
    assert figures(attention.FORWARD, *words) == pytest.approx([T4.tflops(512)] * 2)


def test_the_deterministic_backward_computes_seven_products_for_five(rates):
    rates |= {"dq": 300.0, "dkdv": 400.0}
    expected = 5 / (3 / T4.tflops(300) + 4 / T4.tflops(400))
    words = (*SMALL, "--implementation", "flash", "--options", "none")
    found = figures(attention.BACKWARD, *words)
    assert found == pytest.approx([T4.tflops(400), expected])
    found = figures(attention.BACKWARD, *words, sustained=True)
    assert found == pytest.approx([0.4 * T4.tflops(400), 0.4 * expected])


def test_every_repeated_call_is_modelled(rates):
    for call in command.SUSTAINED:
        found = TuringModel(T4).rate(partial(call.prepare, Arrays(np, filled=False)))
        assert found == pytest.approx(T4.tflops(512))


def test_a_limit_below_idle_power_sustains_nothing(rates):
    for call in command.SUSTAINED:
        prepare = partial(call.prepare, Arrays(np, filled=False))
        assert TuringModel(replace(T4, watts=12)).rate(prepare, sustained=True) is None


def test_what_memory_bounds_is_modelled_by_bandwidth(rates):
    words = ("--operation", "softmax", "--width", "256")
    assert figures(layers.BENCHMARK, *words, machine=MACHINES["RTX 2080 Ti"]) == [616, 616]
    words = ("--kind", "thin", "--size", "1", "2560", "2560")
    assert figures(linear.BENCHMARK, *words) == [320, 320]
    assert figures(linear.BENCHMARK, *words, sustained=True) == [None, None]


@pytest.mark.nvrtc
@pytest.mark.deep
def test_alibi_as_an_expression_takes_at_most_15_percent_longer():
    require_gates_tools()
    words = (*SMALL, "--implementation", "flash", "--options", "alibi,score_mod")
    plain, slopes, expression = figures(attention.FORWARD, *words)
    assert plain > slopes > expression >= 0.85 * slopes


def test_its_parts_are_benchmarks():
    for benchmark, words in PARTS:
        _, parsed = benchmark.parse(*words, *command.CALLS)
        assert parsed.calls == 20
        if benchmark.name.startswith("attention"):
            assert {each.head_dim for each in attention.problems(parsed)} == {64, 80, 128}
        elif benchmark.name == "linear":
            assert all(each.M * each.N for each in linear.products(parsed))


RESULT = {
    "command": "report",
    **HEADER,
    "copy_gb_per_s": 250.0,
    "memory_gb_per_s": 320,
    "machine": "T4",
    "without_model": None,
    "power_limit_watts": 70.0,
    "minutes": 10.0,
    "units": [
        {"unit": "shuffles", "cycles": 4.1, "bytes_per_cycle": None, "modelled": 4},
        {"unit": "loads", "cycles": 640.0, "bytes_per_cycle": 790, "modelled": None},
    ],
    "sustained": [
        {"call": "a product", "tflops_at_first": 45.0, "tflops": 24.0, "seconds": 2.0,
         "clock_mhz": 585.0, "watts": 69.6, "modelled": 58.8, "sustained": 19.6,
         "failed": None},
        {"call": "another", "tflops_at_first": 4.0, "tflops": 3.0, "seconds": 2.0,
         "clock_mhz": None, "watts": None, "modelled": None, "sustained": None,
         "failed": None},
    ],
    "parts": [
        {"command": "attention", "words": ["--calls", "20"], "cut": False, "failed": None,
         "rows": [{**ATTENTION, "modelled": 50.0, "sustained": 17.0}, {
             **labels_of(ATTENTION), "unavailable": "MemoryError: too large",
             "modelled": None, "sustained": None}]},
        {"command": "layers", "words": [], "cut": True, "failed": "RuntimeError: a fault",
         "rows": [{**LAYER, "modelled": 320.0, "sustained": None}]},
    ],
}  # fmt: skip


def test_markdown():
    text = "\n".join(markdown(RESULT))
    assert text.startswith("# cupyattn ")
    assert " on A GPU, 2026-11-20\n" in text
    assert "| a copy | 250 GB/s of 320 specified |" in text
    assert "Modelled as a T4" in text
    assert "## `python -m cupyattn.benchmark attention --calls 20`" in text
    assert "head_dim 64" in text
    assert "| power limit | 70 W |" in text
    assert "| a product | 45.0 | 24.0 | 585 MHz | 70 W | 58.8 | 19.6 |" in text
    assert "| another | 4.0 | 3.0 |  |  |  |  |" in text
    assert "Failed: RuntimeError: a fault" in text
    assert "| 1000.0 us | 20.0 TFLOP/s | 50.0 | 0.40 | 17.0 |" in text
    assert "MemoryError: too large" in text
    assert "| softmax, forward, cupyattn | 1000.0 us | 200.0 GB/s | 320.0 | 0.62 |  |" in text
    assert text.count("Cut: its share of 10 minutes was over (--minutes).") == 1
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {3, 4, 7, 8}
    assert "| shuffles | 4.1 | 4 |" in text
    assert "| loads | 640.0 (790 bytes a cycle) |  |" in text


def test_text_and_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(command, "measure", lambda arguments: RESULT)
    file = tmp_path / "report.json"
    assert main(["report", "--json", str(file)]) == 0
    assert capsys.readouterr().out.rstrip() == "\n".join(markdown(RESULT)).rstrip()
    assert json.loads(file.read_text("utf-8")) == RESULT


class FakeTimer:
    """Tells the seconds that passed: those that rows and models take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow(monkeypatch, a_gpu):
    """A report of three parts, whose rows take 7 s each and their models 5; the clock."""
    clock = FakeTimer()

    def rows(arguments, harness):
        for number in range(arguments.rows):
            clock.now += 7
            yield row_of({"number": number}, "cupyattn", [1e-3], bytes=1e6)

    def figure(row, cases, model, *, sustained):
        clock.now += 0 if sustained else 5
        return 17.0 if sustained else 320.0

    def part(count):
        described = {"title": "", "help": "", "description": "", "note": ""}
        return Benchmark("slow", rows=rows, **described, options=(Option("rows", count, ""),)), ()

    monkeypatch.setattr(command, "PARTS", (part(2), part(1000), part(1000)))
    monkeypatch.setattr(command, "figure", figure)
    monkeypatch.setattr(command, "cuda_device", lambda ordinal: Gpu("Tesla T4"))
    monkeypatch.setattr(command, "measured_on", lambda device: HEADER)
    monkeypatch.setattr(command, "copy_rate", lambda: 250.0)
    monkeypatch.setattr(command, "measured_units", lambda *_: [])
    monkeypatch.setattr(command, "measured_sustained", lambda *_: dict(RESULT["sustained"][0]))
    monkeypatch.setattr(command, "power_limit", lambda device: None)
    monkeypatch.setattr(command, "disassembler_version", lambda: "12.9")
    return clock


def test_a_repeated_call_that_fails_leaves_the_rest_of_the_report(slow, monkeypatch):
    def failing(device, call, model):
        if call is command.SUSTAINED[1]:
            raise MemoryError("out of memory")
        return dict(RESULT["sustained"][0])

    monkeypatch.setattr(command, "measured_sustained", failing)
    result = command.measure(types.SimpleNamespace(minutes=2.0), slow)
    assert [row["tflops"] for row in result["sustained"]] == [24.0, None, 24.0]
    name = command.SUSTAINED[1].name
    assert f"Failed: {name}: MemoryError: out of memory" in list(markdown(result))
    assert result["parts"][0]["rows"]


@pytest.mark.parametrize("minutes", [10.0, 2.0])
def test_a_report_ends_within_its_minutes(slow, minutes, capsys):
    """But for a row that is under way, and a model; what a short part leaves the others have."""
    begun = slow()
    result = command.measure(types.SimpleNamespace(minutes=minutes), slow)
    said = capsys.readouterr().err
    assert said.startswith(f"report: 3 benchmarks in {minutes:g} minutes at most")
    assert 0.9 * 60 * minutes < slow() - begun <= 60 * minutes + 7 + 5
    short, *long = result["parts"]
    assert not short["cut"] and [row["modelled"] for row in short["rows"]] == [320.0, 320.0]
    assert all(part["cut"] and 1 < len(part["rows"]) < 1000 for part in long)
    assert all(part["rows"][0]["modelled"] == 320.0 for part in long)
    assert "Cut: its share of " in "\n".join(markdown(result))


def test_another_limit_than_the_specified_one_is_modelled(slow, monkeypatch):
    machines = []
    monkeypatch.setattr(command, "power_limit", lambda device: 50.0)
    monkeypatch.setattr(command, "measured_units", lambda _, machine: machines.append(machine))
    result = command.measure(types.SimpleNamespace(minutes=0.5), slow)
    assert (result["power_limit_watts"], machines[0].watts) == (50.0, 50)
    assert [call["sustained"] for call in result["sustained"]] == [19.6] * 3


def test_without_a_known_limit_nothing_is_sustained(slow, monkeypatch):
    """The driver of a device that the model does not name reports no watts."""
    monkeypatch.setattr(command, "cuda_device", lambda ordinal: Gpu("Quadro RTX 5000"))
    result = command.measure(types.SimpleNamespace(minutes=0.5), slow)
    found = [*result["sustained"], *(row for part in result["parts"] for row in part["rows"])]
    assert len(found) > 3 and {each["sustained"] for each in found} == {None}
    assert "| power limit | not reported |" in "\n".join(markdown(result))


def test_a_part_that_fails_leaves_the_others(slow, monkeypatch):
    def rows(arguments, harness):
        raise RuntimeError("a fault")

    first, *others = command.PARTS
    broken = (replace(first[0], rows=rows), first[1])
    monkeypatch.setattr(command, "PARTS", (broken, *others))
    failed, *parts = command.measure(types.SimpleNamespace(minutes=2), slow)["parts"]
    assert (failed["failed"], failed["rows"]) == ("RuntimeError: a fault", [])
    assert all(part["rows"] and part["failed"] is None for part in parts)


class Cuda:
    """A GPU of which nvidia-smi reports what `reported` has; calls take the seconds in `took`."""

    def __init__(self, monkeypatch, reported, took):
        self.reported = reported
        device = types.SimpleNamespace(pci_bus_id="0000:00:04.0")
        cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda ordinal: device))
        monkeypatch.setattr(command, "load_cupy", lambda: cupy)
        monkeypatch.setattr(command, "Arrays", lambda xp, filled=True: types.SimpleNamespace())
        monkeypatch.setattr(command, "queried", self.queried)
        monkeypatch.setattr(command, "Timer", lambda *given: Queue(took, self.asked))
        monkeypatch.setattr(command, "_SHORT", Queue([0.001], None))
        self.asked = threading.Event()

    def queried(self, *fields, gpu):
        assert gpu == "0000:00:04.0"
        self.asked.set()
        return self.reported


class Queue(NamedTuple):
    """A timer whose calls end when nvidia-smi was asked."""

    took: list[float]
    asked: threading.Event | None

    def queued(self, call):
        assert self.asked is None or self.asked.wait(10)
        return self.took


CALL = command.SustainedCall("a call", 20e9, lambda arrays: None)


def test_a_repeated_call_has_the_rate_of_its_end_and_a_clock(monkeypatch):
    took = [0.001] * 12 + [0.002] * 4
    Cuda(monkeypatch, ["585", "69.5"], took)
    model = types.SimpleNamespace(rate=lambda prepare, *, sustained: 8.0 if sustained else 30.0)
    found = command.measured_sustained(Gpu("Tesla T4"), CALL, model)
    assert (found["tflops_at_first"], found["tflops"]) == pytest.approx((20, 10))
    assert (found["clock_mhz"], found["watts"]) == (585, 69.5)
    assert (found["modelled"], found["sustained"]) == (30, 8)


@pytest.mark.parametrize("reported", [None, ["585", "[N/A]"]])
def test_a_clock_that_is_not_reported_is_left_out(monkeypatch, reported):
    Cuda(monkeypatch, reported, [0.001] * 4)
    found = command.measured_sustained(Gpu("Tesla T4"), CALL, None)
    assert (found["clock_mhz"], found["watts"], found["sustained"]) == (None, None, None)


@pytest.mark.parametrize(
    ("reported", "watts"),
    [(None, None), (["70.00"], 70), (["[N/A]"], None), (["0.00"], None), (["nan"], None)],
)
def test_a_power_limit_is_what_nvidia_smi_reports(monkeypatch, reported, watts):
    Cuda(monkeypatch, reported, [])
    assert command.power_limit(Gpu("Tesla T4")) == watts


@pytest.mark.nvrtc
@pytest.mark.parametrize("unit", ceiling_kernels.UNITS, ids=lambda unit: unit.name)
def test_a_unit_executes_its_instruction_in_every_chain(unit):
    """Neither merged nor removed by the assembler, and nothing else in the loop binds."""
    require_gates_tools()
    cubin = compile_cubin(ceiling_kernels.unit_rates(unit), TURING).code
    (code,) = parse_listing(disassemble(cubin)).values()
    name = unit.opcode.partition(".")[0]
    assert sum(each.name == name for each in code) == unit.in_flight


@pytest.mark.gpu
def test_a_repeated_call_has_a_rate(monkeypatch):
    monkeypatch.undo()  # the driver's own words
    found = command.measured_sustained(cuda_device(0), command.SUSTAINED[1], None, seconds=0.2)
    assert found["tflops"] > 0.1 and found["seconds"] > 0.1
    assert found["clock_mhz"] is None or found["clock_mhz"] > 100


@pytest.mark.gpu
def test_every_unit_takes_some_cycles(monkeypatch):
    monkeypatch.undo()  # the driver's own words
    units = command.measured_units(cuda_device(0), T4)
    assert all(0.1 < unit["cycles"] < 1e5 for unit in units)
    assert any(unit["bytes_per_cycle"] for unit in units)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, capsys):
    monkeypatch.undo()  # the driver's own words
    words = ("--head-dim", "64", "--seqlen", "128", "--tokens", "128", "--options", "none")
    thin = ("--kind", "thin", "--size", "1", "256", "512")
    parts = ((attention.FORWARD, words), (linear.BENCHMARK, thin))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "CALLS", ("--calls", "3", "--warm-up", "1"))
    assert main(["report"]) == 0
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed
    assert "GB/s" in printed
    assert ("Modelled as a" in printed) != ("Measured alone: " in printed)
