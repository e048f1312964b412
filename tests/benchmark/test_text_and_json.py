"""Every benchmark: a small run, with and without a GPU, and the other libraries that it names."""

from __future__ import annotations

import json

import pytest
from support.fake_gpu import CEILINGS

from cupyattn import __main__ as command_line
from cupyattn.benchmark import __main__ as benchmarks
from cupyattn.benchmark import libraries, linear
from cupyattn.benchmark.cases import Harness, binding, products_of

ATTENTION = "--seqlen 16 --batch 1 --width 16 --head-dim 8 --options causal --implementation flash"
CACHE = "--heads 4 --kv-heads 2 --head-dim 8 --block-size 16"
FLASH = ["cupyattn flash"]
BOTH = [*FLASH, "cupyattn flash deterministic"]
PACKED = ["cupyattn dense", "cupyattn equal", "cupyattn ragged"]
RUNS = [
    ("attention", ATTENTION, "Attention forward", 2 * FLASH),
    ("attention_backward", ATTENTION, "Attention backward", 2 * BOTH),
    ("training_step", "attention --training-step --batch 2 --seqlen 16 --heads 3 --head-dim 8",
     "Attention's training step", [*BOTH, "cupyattn naive"]),
    ("block_mask", "attention --block-mask --seqlen 300 --documents 4 --heads 2 --head-dim 8",
     "Attention forward of documents in one sequence", 3 * FLASH),
    ("linear", "--kind large backward --size 8 16 24", "linear", 2 * ["cupyattn"]),
    ("linear", "--kind thin --size 2 16 24", "linear", ["cupyattn", "read w"]),
    ("layers", "--operation softmax --rows 4 --width 256", "Layers", 2 * ["cupyattn"]),
    ("decode", f"--batch 2 --context 40 {CACHE} --cache float int4", "Decoding", 3 * ["cupyattn"]),
    ("prefill", f"decode --prefill --batch 1 --context 40 12 {CACHE} --queries 20", "Prefill",
     2 * ["cupyattn dense", "cupyattn paged", "cupyattn packed"]),
    ("kv_cache", f"decode --cache-operations --tokens 20 {CACHE} --cache float int8",
     "Paged caches", 6 * ["cupyattn"]),
    ("varlen", "--tokens 40 --length 10 --heads 4 --kv-heads 2 --head-dim 8", "Packed sequences",
     4 * PACKED),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("name", "words", "title", "implementations"),
    RUNS,
    ids=[f"{run[0]}-{run[3][-1]}" for run in RUNS],
)
def test_rows_are_held_against_the_ceiling_that_binds(
    name, words, title, implementations, dtype, a_gpu, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(linear.LinearInputs, "reading_calls", lambda self: [lambda: None])
    monkeypatch.setattr(Harness, "sets", lambda self, traffic, most: 2)
    file = tmp_path / "result.json"
    words = words if words.partition(" ")[0] in ("attention", "decode") else f"{name} {words}"
    assert benchmarks.main([*words.split(), "--dtype", dtype, "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(f"{title} on A GPU, 2026-11-20")
    assert ("2.0 us" in printed and "6.0 us" in printed) or "5.6 us" in printed
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"] == name
    assert [row["implementation"] for row in result["rows"]] == implementations
    products = products_of(dtype)
    for row in result["rows"]:
        assert row["ceiling"] in (products, "copy_gb_per_s", "read_gb_per_s")
        rate = row["tflops" if row["ceiling"] == products else "gb_per_s"]
        assert row["of_ceiling"] == pytest.approx(
            rate / CEILINGS[binding(row["ceiling"], CEILINGS)]
        )


@pytest.mark.parametrize(
    ("main", "name"),
    [
        *((benchmarks.main, each.name) for each in benchmarks.BENCHMARKS
          if each.gpus == 1 and each.modelled is None),
        *((command_line.main, name) for name in ("report", "tune")),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_without_a_gpu_it_is_said_at_once(main, name, no_gpu, capsys):
    assert main([name]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{name}: there is no CUDA device")


def test_every_benchmark_has_baselines_of_the_one_list():
    named = {name for benchmark in benchmarks.BENCHMARKS for name in benchmark.baselines}
    assert named == set(libraries.BASELINES), "and none is on the list for nobody"
