"""``python -m cupyattn.benchmark readme``: figures that fresh results replace, and their tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from support.fake_gpu import HEADER
from support.made_up_results import FEW, attention, layers, result

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.readme import tables
from cupyattn.benchmark.readme.figures import load, merge, store
from cupyattn.benchmark.readme.marks import between
from cupyattn.kernels.configs.attention.tensor_core.backward_dkdv import dkdv_row
from cupyattn.kernels.configs.attention.tensor_core.forward_rows import flash_row

ON = {name: HEADER[name] for name in ("device", "code")}


def row(head_dim, contender, tflops, option="plain"):
    figures = {"tflops": tflops} if tflops else {"unavailable": "no kernel"}
    case = {"batch": 4, "seqlen": 4096, "head_dim": head_dim, "dtype": "float16", "option": option}
    return {**case, "contender": contender, **figures}


def both(head_dim, contender, tflops):
    return [row(head_dim, contender, tflops, option) for option in ("plain", "causal")]


@pytest.fixture
def figures():
    """What is committed: two head dims of ours, a peer, a layer, two sentences."""
    ours = [*both(64, "cupyattn flash", 100.0), *both(128, "cupyattn flash", 200.0)]
    peers = [*both(64, "peer", 50.25), *both(128, "peer", None)]
    norm = {"operation": "rms_norm", "rows": 8192, "width": 768, "direction": "forward"}
    loss = {**norm, "operation": "cross_entropy", "rows": 2048, "width": 128256}
    quoted = {"command": "attention", "seqlen": 4096, "option": "causal", **{"contender": FEW[0]}}
    return {
        "attention": [
            {"command": "attention", "invocation": "benchmark attention", "date": "2026-01-02",
             **ON, "rows": ours},
            {"command": "attention", "note": "by hand", "date": "2026-01-01", **ON, "rows": peers},
        ],
        "layers": [
            {"command": "layers", "invocation": "benchmark layers", "date": "2026-01-03", **ON,
             "ceilings": {"copy_gb_per_s": 4321.0}, "rows": [
                 {**norm, "contender": "cupyattn", "times": {"p50_s": 1e-5}},
                 {**norm, "contender": "torch compile", "times": {"p50_s": 1.5e-5}},
                 {**norm, "width": 2048, "contender": "cupyattn", "times": {"p50_s": 2e-5}},
                 {**norm, "direction": "backward", "contender": "cupyattn",
                  "times": {"p50_s": 3e-5}},
                 {**loss, "contender": "cupyattn", "times": {"p50_s": 1.349e-4}},
             ]},
        ],
        "others": [
            {"what": "causal, D 64 / 128", "arguments": "`attention`", "date": "2026-01-04", **ON,
             "figures": "{:.0f} / {:.0f}", "rows": [
                 {**quoted, "head_dim": 64, "tflops": 11.0},
                 {**quoted, "head_dim": 128, "tflops": 22.0},
             ]},
            {"what": "of another code", "arguments": "`host`", "date": "2026-01-05",
             "device": "A GPU", "code": ["sm_90"], "figures": "3 us"},
        ],
    }  # fmt: skip


def test_the_table_of_attention(figures):
    chart = tables.chart_of(figures["attention"])
    head, _, *lines = tables.attention_table(chart).splitlines()
    assert head.startswith("| head dim | forward: cupyattn flash | forward: peer | backward: cupy")
    models = [
        f"{flash_row(75, dim, dim).gates.models:.2f} / "
        f"{dkdv_row(75, dim, dim, True).gates.models:.2f}"
        for dim in (64, 128)
    ]
    assert lines == [
        f"| 64 | 100 / 100 | 50 / 50 |  |  | {models[0]} |",
        f"| 128 | 200 / 200 | none |  |  | {models[1]} |",
    ]


def test_the_table_of_layers(figures):
    head, _, *lines = tables.layers_table(figures["layers"]).splitlines()
    assert head == "| operation | forward, 768 | 2,048 | backward, 768 | 2,048 |"
    assert lines == [
        "| rms_norm | 10.0 (1.50) | 20.0 | 30.0 |  |",
        "| cross_entropy, 2,048 rows of 128,256 |  | 134.9 |  |  |",
    ]


def test_peers_that_are_measured_beside_a_layer_join_its_table(figures):
    fresh = layers(date="2026-02-01")
    compiled = [each for each in fresh["rows"] if each["contender"] == "torch compile"]
    for each in compiled:
        eager = {**each, "contender": "torch eager", "times": {"p50_s": 3 * each["times"]["p50_s"]}}
        fresh["rows"].append(eager)
    of_cross_entropy = next(each for each in compiled if each["operation"] == "cross_entropy")
    fresh["rows"].remove(of_cross_entropy)
    merged = merge(figures, [fresh])
    once = merge(merged.figures, [fresh])
    assert once.figures == merged.figures and once.replaced == merged.replaced
    assert once.kept.keys() == merged.kept.keys(), "each row once"
    (of_all,) = merged.figures["layers"]
    lines = tables.layers_table([of_all]).splitlines()
    assert lines[2].startswith("| rms_norm | 9.0 (1.10, 3.29) |")
    assert lines[3].endswith("(-, 3.37) |  |  |")


def test_the_table_of_sentences(figures):
    head, _, *lines = tables.sentences_table(figures["others"]).splitlines()
    assert head.endswith("| figures | A GPU running compute_75 code |")
    assert lines == [
        "| causal, D 64 / 128 | `attention` | 11 / 22 | 2026-01-04 |",
        "| of another code | `host` | 3 us | A GPU running sm_90 code, 2026-01-05 |",
    ]


def test_sources(figures):
    ours, peers = figures["attention"]
    backward = {
        **ours,
        "command": "attention_backward",
        "invocation": "benchmark attention_backward",
    }
    _, head, _, *lines = tables.sources([ours, backward, peers], "head_dim").splitlines()
    assert head == "| figures of | measured on | date | by |"
    assert lines == [
        "| cupyattn flash | A GPU running compute_75 code | 2026-01-02 | `benchmark attention`, "
        "the same with `attention_backward` |",
        "| peer | A GPU running compute_75 code | 2026-01-01 | by hand |",
    ]
    later = {**backward, "date": "2026-02-01"}
    lines = tables.sources([ours, later], "head_dim")
    assert lines.count("| cupyattn flash | A GPU") == 2, "their commands tell them apart"
    (of_layers,) = figures["layers"]
    assert "a copy at 4,321 GB/s | 2026-01-03 |" in tables.sources([of_layers], "operation")


def test_the_mode_of_torch_compile_is_shown(figures):
    """Of the run whose ratios README has; not where no row is torch.compile's."""
    fresh = layers(date="2026-02-01", torch_compile="max-autotune-no-cudagraphs")
    (merged,) = merge(figures, [fresh]).figures["layers"]
    said = "torch.compile in mode max-autotune-no-cudagraphs"
    assert said in tables.sources([merged], "operation")
    own = [row for row in merged["rows"] if row["contender"] == "cupyattn"]
    assert said not in tables.sources([{**merged, "rows": own}], "operation")
    committed = load(Path(__file__).parents[2])["layers"]
    compiled = [each for each in committed if "torch compile" in str(each["rows"])]
    assert compiled and all(each["torch_compile"] for each in compiled)


def test_fresh_rows_replace_those_of_the_same_labels(figures):
    """Head dim 64 was measured again, of ours alone; 128 and the peers keep their date."""
    fresh = attention((1024, 4096), (64,), contenders=FEW, date="2026-02-01", invocation="again")
    before = copy.deepcopy(figures)
    merged = merge(figures, [fresh])
    assert (merged.replaced, merged.kept.total()) == (2, 6 + 5 + 2)
    assert merged.kept["attention, peer, of 2026-01-01"] == 4
    new, ours, peers = merged.figures["attention"]
    assert (new["date"], new["invocation"], new["device"]) == ("2026-02-01", "again", "A GPU")
    assert [(each["option"], each["tflops"]) for each in new["rows"]] == [
        ("plain", _tflops(fresh, "plain")), ("causal", _tflops(fresh, "causal"))
    ]  # fmt: skip
    assert all(set(each) == set(before["attention"][0]["rows"][0]) for each in new["rows"])
    assert ours == {**before["attention"][0], "rows": before["attention"][0]["rows"][2:]}
    assert peers == before["attention"][1]
    assert merged.figures["others"] == before["others"], "one of its two rows is not there"
    assert figures == before, "what was passed is left alone"
    lines = tables.sources(merged.figures["attention"], "head_dim")
    assert "| cupyattn flash (64) | A GPU" in lines and "| cupyattn flash (128) | A GPU" in lines


def _tflops(of, option):
    (found,) = [
        row["tflops"] for row in of["rows"]
        if (row["option"], row["contender"], row["seqlen"]) == (option, FEW[0], 4096)
    ]  # fmt: skip
    return float(f"{found:.6g}")


def test_a_sentence_is_replaced_whole(figures):
    fresh = attention(head_dims=(64, 128), contenders=FEW, date="2026-02-01")
    sentence, other = merge(figures, [fresh]).figures["others"]
    assert sentence["date"] == "2026-02-01" and sentence["figures"] == "{:.0f} / {:.0f}"
    assert [each["tflops"] > 280 for each in sentence["rows"]] == [True, True]
    assert other == figures["others"][1]


def test_a_sentence_quotes_speeds_of_memory_too(figures):
    labels = {"context": 4096, "contender": "cupyattn"}
    step = {"command": "decode", **labels, "gb_per_s": 4000.0}
    sentence = {"what": "decoding", "arguments": "`decode`", "date": "2026-01-06", **ON,
                "figures": "{:,.0f} GB/s", "rows": [step]}  # fmt: skip
    assert "4,000 GB/s" in tables.sentences_table([sentence])
    fresh = result("decode", [{**labels, "tflops": None, "gb_per_s": 4321.4}], date="2026-02-01")
    (merged,) = merge({**figures, "others": [sentence]}, [fresh]).figures["others"]
    assert merged["rows"] == [{**step, "gb_per_s": 4321.4}] and merged["date"] == "2026-02-01"


def test_times_are_replaced_and_ceilings_go_with_them(figures):
    fresh = layers()
    merged = merge(figures, [fresh])
    (of_all,) = merged.figures["layers"]
    assert merged.replaced == 8 and of_all["ceilings"] == fresh["ceilings"]
    assert {len(each["times"]) for each in of_all["rows"]} == {1}, "medians are enough"
    norm = next(each for each in fresh["rows"] if each["operation"] == "rms_norm")
    assert of_all["rows"][0]["times"]["p50_s"] == pytest.approx(norm["times"]["p50_s"], rel=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        {"device": "Another"},
        {"code": ["sm_90"]},
        {"modelled": True},
        {"command": "varlen"},
        {"date": None},
        {"rows": [{**row(64, "cupyattn flash", 1.0), "dtype": "float32"}]},
        {"rows": [row(64, "cupyattn tiled", 1.0)]},
        {"rows": [{**row(64, "cupyattn flash", 1.0), "tflops": None}]},
    ],
    ids=str,
)
def test_what_was_measured_otherwise_replaces_nothing(figures, more):
    merged = merge(figures, [{**attention(head_dims=(64,), contenders=FEW), **more}])
    assert merged.replaced == 0 and merged.figures == figures


def test_the_last_of_several_runs_counts(figures):
    runs = [
        result("attention", [row(64, "cupyattn flash", tflops)], date=date)
        for tflops, date in ((1.0, "2026-02-01"), (2.0, "2026-02-02"))
    ]
    new, *_ = merge(figures, runs).figures["attention"]
    assert new["date"] == "2026-02-02" and new["rows"][0]["tflops"] == 2.0


def test_who_was_not_asked_keeps_its_figure(figures):
    fresh = result("attention", [{**row(64, "peer", None), "left_out": True}])
    merged = merge(figures, [fresh])
    assert merged.replaced == 0 and merged.figures == figures


def test_a_sentence_of_a_kernel_that_is_gone_is_left_for_its_writer(figures):
    fresh = attention(head_dims=(64, 128), contenders=FEW)
    gone = next(each for each in fresh["rows"] if each["option"] == "causal")
    fresh["rows"] = [each for each in fresh["rows"] if each is not gone]
    fresh["rows"].append({**row(64, FEW[0], None, "causal")})
    merged = merge(figures, [fresh])
    assert merged.figures["others"] == figures["others"]
    assert "11 / 22" in tables.sentences_table(merged.figures["others"])


def test_a_kernel_that_is_gone_is_told(figures):
    fresh = result("attention", [row(64, "peer", None)])
    new, *_ = merge(figures, [fresh]).figures["attention"]
    assert new["rows"][0]["unavailable"] == "no kernel" and "tflops" not in new["rows"][0]


MARKS = "".join(
    f"<!-- {name}: written by {tables.WRITTEN_BY} -->\nold\n<!-- {name}: end -->\n"
    for name in ("speed", "layers", "others")
)


@pytest.fixture
def checkout(tmp_path, figures):
    (tmp_path / ".github" / "figures").mkdir(parents=True)
    store(tmp_path, figures)
    (tmp_path / "README.md").write_text(f"# Title\n{MARKS}The end.\n")
    return tmp_path


def test_the_command(checkout, figures, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    assert load(checkout) == figures, "store writes what load reads"
    fresh = checkout / "fresh.json"
    measured_again = attention(head_dims=(64,), contenders=FEW)
    fresh.write_text(json.dumps([measured_again, layers()]))
    assert main(["readme", str(fresh), "--checkout", str(checkout)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("10 rows have new figures, 8 keep theirs\n")
    assert "  kept: attention, cupyattn flash, of 2026-01-02: 2\n" in said
    text = (checkout / "README.md").read_text()
    assert "old" not in text and text.startswith("# Title\n") and text.endswith("The end.\n")
    new = " / ".join(f"{_tflops(measured_again, option):.0f}" for option in ("plain", "causal"))
    assert f"| 64 | {new} | 50 / 50 |" in text and "| 128 | 200 / 200 | none |" in text
    pictures = sorted(path.name for path in (checkout / ".github").glob("speed*"))
    assert pictures == ["speed-dark.svg", "speed-light.svg"]
    files = [checkout / ".github" / name for name in (*pictures, "figures/attention.json")]
    before = [file.read_text() for file in files]
    assert main(["readme", "--checkout", str(checkout)]) == 0
    assert (checkout / "README.md").read_text() == text
    assert [file.read_text() for file in files] == before


@pytest.mark.parametrize("results", [[], [attention(device="Another")]], ids=["none", "elsewhere"])
def test_results_that_replace_nothing(checkout, results, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    fresh = checkout / "fresh.json"
    fresh.write_text(json.dumps(results))
    assert main(["readme", str(fresh), "--checkout", str(checkout)]) == 1
    said = capsys.readouterr().err
    assert ("Another running compute_75" if results else "results of nothing") in said
    assert "its figures are of A GPU running compute_75 code, A GPU running sm_90 code" in said
    assert "old" in (checkout / "README.md").read_text()


def test_a_readme_without_marks_is_left_alone(checkout, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    (checkout / "README.md").write_text("# Title\n")
    assert main(["readme", "--checkout", str(checkout)]) == 1
    assert "without marks for the table speed" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == "# Title\n"


def test_elsewhere_than_in_a_checkout(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    assert main(["readme", "--checkout", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"figures in {tmp_path}; README's figures are those of a checkout" in said


def test_what_stands_between_marks_is_replaced():
    text = "a\n<!-- t: written by me -->\nx\ny\n<!-- t: end -->\nb\n"
    assert between(text, "t", "me", "z\n") == text.replace("x\ny\n", "z\n")
    with pytest.raises(ValueError, match="without marks for the table t"):
        between("<!-- t: end -->\n", "t", "me", "z\n")
