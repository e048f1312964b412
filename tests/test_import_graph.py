"""Imports point one way, and heavy ones wait until they are needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cupyattn

PACKAGE = Path(cupyattn.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Room: the rooms that it may import besides itself. A room is a folder or a module at the top; ""
# is the package's own __init__.
BOTTOM = {"reference", "gradients", "arrays", "errors"}
ROOMS = {
    "errors": set(),
    "emulator": set(),
    "arrays": {"errors"},
    "gradients": {"arrays"},
    "reference": {"gradients"},
    "kernels": {"arrays", "errors", "emulator"},
    "turing": {"kernels", "errors"},
    "ops": {"kernels", "arrays", "errors"},
    "functional": {"ops", "kernels", "emulator", *BOTTOM},
    "": {"functional"},
    "cli": {"", "functional", "ops", "turing", "kernels", "emulator", *BOTTOM},
    "benchmark": {"", "cli", "functional", "ops", "kernels", "emulator", *BOTTOM},
    "__main__": {"cli"},
}
CUPY = {"cupy", "cupy_backends", "cupyx"}
MAY_IMPORT_CUPY = {"arrays", "kernels", "functional", "cli", "benchmark"}
LAZY = {*CUPY, "cuda", "rich", "ml_dtypes", "torch"}


def name_of(path: Path) -> str:
    """cupyattn/kernels/launch.py -> cupyattn.kernels.launch."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def room_of(module: str) -> str:
    _, _, inner = module.partition(".")
    return inner.partition(".")[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, within: ast.AST | None = None) -> Iterator[str]:
    """The modules that a file imports, anywhere in it or in a part of it."""
    here = name_of(path)
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    for node in ast.walk(within or tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in NAMES else base


def imports_at_import(path: Path) -> Iterator[str]:
    """The modules imported when the file is: outside of functions and TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree_of(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(path, node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


def ids(path: Path) -> str:
    return name_of(path)


def test_the_reader_of_imports_sees_them():
    """The tests below would pass for a reader that finds nothing."""
    found = set(imports(PACKAGE / "functional" / "attention.py"))
    assert {"cupyattn.reference", "cupyattn.ops.attention", "typing"} <= found
    assert "cupyattn.reference.attention" in set(imports(PACKAGE / "reference" / "__init__.py"))
    assert "cupy" in set(imports(PACKAGE / "kernels" / "cuda_device.py"))
    assert "cupy" not in set(imports_at_import(PACKAGE / "kernels" / "device.py"))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_one_way(path):
    room = room_of(name_of(path))
    assert room in ROOMS, f"{room} is a new room: say in ROOMS what it may import"
    for imported in imports(path):
        if imported.partition(".")[0] == "cupyattn":
            target = room_of(imported)
            assert target in ROOMS[room] | {room}, f"{room} may not import {imported}"


def test_rooms_have_no_cycle():
    """ROOMS itself is an order: each room stands below those that may import it."""
    below: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} may import {allowed - below}, which come after it"
        below.add(room)


def test_modules_have_no_cycle():
    graph = {
        name: {imported for imported in imports_at_import(path) if imported in NAMES} - {name}
        for name, path in NAMES.items()
    }
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in finished:
            for imported in graph[name]:
                visit(imported, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_heavy_imports_are_lazy(path):
    at_import = {imported.partition(".")[0] for imported in imports_at_import(path)}
    assert not at_import & LAZY


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_who_may_import_cupy(path):
    if {imported.partition(".")[0] for imported in imports(path)} & CUPY:
        assert room_of(name_of(path)) in MAY_IMPORT_CUPY


def test_the_reference_imports_numpy_alone():
    for path in (PACKAGE / "reference").rglob("*.py"):
        for imported in imports(path):
            top = imported.partition(".")[0]
            assert top in sys.stdlib_module_names | {"numpy", "cupyattn"}, f"{path}: {imported}"


def attributes(path: Path) -> set[str]:
    """The names and attributes that a file's code (not its comments and docstrings) uses."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.Name)
    }


def test_only_kernels_knows_raw_modules():
    knowing = {room_of(name) for name, path in NAMES.items() if "RawModule" in attributes(path)}
    assert knowing == {"kernels"}


def test_only_launch_starts_kernels():
    def starts(path: Path) -> bool:
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "start"
            for node in ast.walk(tree_of(path))
        )

    outside = {name: path for name, path in NAMES.items() if room_of(name) != "emulator"}
    assert {name for name, path in outside.items() if starts(path)} == {"cupyattn.kernels.launch"}


def test_import_is_light(tmp_path):
    """`import cupyattn` imports neither CuPy nor rich, and compiles nothing."""
    cache_folder = tmp_path / "kernels"
    script = "import sys, json, cupyattn; print(json.dumps(sorted(sys.modules)))"
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "CUPYATTN_CACHE_DIR": str(cache_folder),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "cupyattn" in loaded
    assert not loaded & LAZY
    assert not cache_folder.exists()
