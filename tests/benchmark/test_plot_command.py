"""``python -m cupyattn.benchmark plot``: the files that it reads and writes."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest
from support.drawn import pages
from support.made_up_results import FEW, attention, layers

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.plot import (
    head_dims,
    style,
)
from cupyattn.benchmark.plot.command import _PICTURES, PICTURES


def texts(path):
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "results.json"
    of_layers = layers()
    of_layers["rows"] = [row for row in of_layers["rows"] if row["operation"] == "swiglu"]
    path.write_text(json.dumps([attention(head_dims=(64,), contenders=FEW), of_layers]))
    return path


def test_files(file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    monkeypatch.setattr(style, "_PIXELS_PER_INCH", 20)
    folder = tmp_path / "new" / "pictures"
    assert main(["plot", str(file), "--out", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert capsys.readouterr().out.split() == [str(folder / name) for name in _in_order(names)]
    for name in ("attention-tflops", "attention-roofline", "layers-bandwidth", head_dims.NAME):
        assert {
            f"{name}-{theme}.{kind}" for theme in ("light", "dark") for kind in ("svg", "png")
        } <= names
    assert (folder / "attention-memory-dark.png").read_bytes().startswith(b"\x89PNG")
    throughput = texts(folder / "attention-tflops-light.svg")
    ceiling = "our code's mma alone: 600 TFLOP/s"
    for text in ("attention: TFLOP/s (more is better)", "cupyattn flash", ceiling):
        assert text in throughput
    assert "a copy: 4,000 GB/s" in texts(folder / "layers-bandwidth-light.svg")
    again = tmp_path / "again"
    assert main(["plot", str(file), "--out", str(again), "--format", "svg"]) == 0
    for name in filter(lambda name: name.endswith("svg"), names):
        assert (again / name).read_text() == (folder / name).read_text()


def test_some_pictures_in_one_format(file, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    words = ("--only", "tflops", "by-head-dim", "--format", "svg")
    assert main(["plot", str(file), "--out", str(tmp_path / "some"), *words]) == 0
    assert {path.name for path in (tmp_path / "some").iterdir()} == {
        f"{name}-{theme}.svg"
        for name in ("attention-tflops", head_dims.NAME) for theme in ("light", "dark")
    }  # fmt: skip
    assert main(["plot", str(file), "--out", str(tmp_path), "--only", "speed-up"]) == 1
    assert f"no figures in {file} for speed-up" in capsys.readouterr().err


def test_every_picture_can_be_asked_for():
    assert {
        name for module in _PICTURES for name in pages(module, attention((128, 512, 1024, 4096)))
    } | {head_dims.NAME.removeprefix("attention-")} == set(PICTURES)


def _in_order(names):
    """As they are printed: by command, picture, theme, kind."""
    begins = ("attention-", "layers-")
    pictures = ("latency", "tflops", "bandwidth", "speed-up-peers", "scaling", "memory", "roofline",
                "percentiles")  # fmt: skip
    every = [begin + picture for begin in begins for picture in pictures] + [head_dims.NAME]
    ordered = [f"{name}-{theme}.{kind}" for name in every for theme in ("light", "dark")
               for kind in ("svg", "png")]  # fmt: skip
    assert names <= set(ordered), names - set(ordered)
    return [name for name in ordered if name in names]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("TFLOP/s: many", "is no JSON file"),
        ('{"command": "turing"}', "holds something else"),
        ("[1]", "holds something else"),
    ],
)
def test_files_that_are_no_results(tmp_path, capsys, content, message):
    path = tmp_path / "some.json"
    path.write_text(content)
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and f"{path} {message}" in said.err
    assert not list(tmp_path.glob("*.svg"))


def test_results_without_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    path = tmp_path / "none.json"
    path.write_text("[]")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 1
    assert f"no figures in {path}" in capsys.readouterr().err


def test_a_missing_file(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_without_matplotlib(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(file), "--out", str(tmp_path / "pictures")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
