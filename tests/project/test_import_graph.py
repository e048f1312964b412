"""Imports point one way, and heavy ones wait until they are needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import cupyattn
from cupyattn import models

CUPY = {"cupy", "cupy_backends", "cupyx"}
LAZY = {*CUPY, "cuda", "rich", "ml_dtypes", "torch", "matplotlib"}
PACKAGE = Path(cupyattn.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


# Room: the rooms that it may import besides itself. A room is a folder, a family of `ops`, or a
# module at the top; "" is the package's own __init__. Lower layers come first.
FAMILIES = {
    "ops.softmax": set(),
    "ops.activations": set(),
    "ops.rope": set(),
    "ops.embedding": set(),
    "ops.optimizer": set(),
    "ops.sampling": set(),
    "ops.linear": {"ops.activations"},
    "ops.norms": {"ops.linear"},
    "ops.losses": {"ops.linear", "ops.softmax"},
    "ops.attention": {"ops.rope"},
    "ops.cache": {"ops.attention", "ops.norms", "ops.rope"},
}
ROOMS = {
    "emulator": set(),
    "runtime": {"emulator"},
    "ops": set(),
    **{family: {"runtime", "ops", *others} for family, others in FAMILIES.items()},
    "registry": {"runtime", *FAMILIES},
    "reference": {"runtime", *FAMILIES},
    "environment": {"runtime", "registry"},
    "autodiff": {"runtime", *FAMILIES},
    "functions": {"runtime", "autodiff", "environment", *FAMILIES},
    "kv_cache": {"runtime", "functions"},
    "turing": {"runtime", "registry", "emulator"},
    "explanation": {"runtime", "turing"},
    "": {"runtime", "functions", "autodiff", "kv_cache", "emulator", "explanation"},
    "testing": {
        *("", "runtime", "reference", "ops.activations", "ops.attention", "ops.linear"),
        "ops.norms",
    },
    "distributed": {"", "runtime"},
    "models": {"", "runtime", "distributed", "kv_cache", "ops.linear"},
    "cli": {
        *("", "models", "environment", "reference", "registry", "turing", "emulator", "runtime"),
        "ops.attention",
    },
    "benchmark": {
        *("", "cli", "models", "distributed", "kv_cache", "environment", "registry", "turing"),
        *("runtime", "emulator", "ops.attention", "ops.cache", "ops.linear", "ops.rope"),
    },
    "__main__": {"cli", "benchmark", "runtime"},
}


# The first gives CuPy a folder that it can write; the others import what is below it after that.
MAY_IMPORT_CUPY = {
    "cupyattn.runtime.cupy_library": "cupy",
    "cupyattn.runtime.device.cuda": "cupy_backends",
}


def name_of(path: Path) -> str:
    """cupyattn/runtime/plan.py -> cupyattn.runtime.plan."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def room_of(module: str) -> str:
    _, *parts = module.split(".")
    return ".".join(parts[: 1 + (parts[:1] == ["ops"])])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports, anywhere in it."""
    return tuple(imports_within(path, tree_of(path)))


def imports_within(path: Path, within: ast.AST) -> Iterator[str]:
    """Yield the modules that a part of a file imports."""
    here = name_of(path)
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    for node in ast.walk(within):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in NAMES else base


def imports_at_import(path: Path) -> Iterator[str]:
    """The modules imported when the file is: outside of functions, and of TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree_of(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_within(path, node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


def test_the_reader_of_imports_sees_them():
    """The tests below would pass for a reader that finds nothing."""
    found = set(imports(PACKAGE / "ops" / "attention" / "api.py"))
    assert {"cupyattn.ops.attention.forward", "typing"} <= found
    assert "cupyattn.ops.attention.reference.dense" in set(imports(PACKAGE / "reference.py"))
    assert "cupy" in set(imports(PACKAGE / "runtime" / "cupy_library.py"))
    assert "cupy" not in set(imports_at_import(PACKAGE / "runtime" / "cupy_library.py"))


def test_every_room_is_known():
    rooms = set(map(room_of, NAMES))
    assert len(NAMES) > 300
    assert rooms <= ROOMS.keys(), "a new room: say in ROOMS what it may import"


def test_imports_point_one_way():
    wrong = [
        (name, imported)
        for name, path in NAMES.items()
        for imported in imports(path)
        if imported.partition(".")[0] == "cupyattn"
        and room_of(imported) not in ROOMS[room_of(name)] | {room_of(name)}
    ]
    assert not wrong, "these modules may not import these others"


def test_rooms_have_no_cycle():
    """ROOMS itself is an order: each room is below those that may import it."""
    below: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} may import {allowed - below}, which come after it"
        below.add(room)


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """A way through the graph that comes back to where it began, or nothing."""
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name not in finished:
            for imported in sorted(graph[name]):
                if found := visit(imported, [*trail, name]):
                    return found
            finished.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in graph)), [])


def test_a_cycle_is_found():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a", "e"}, "e": {"f"}, "f": {"d"}}
    assert cycle_in(graph) == ["d", "e", "f", "d"]
    assert cycle_in({**graph, "f": {"c"}}) == []


def test_imports_for_type_hints_and_in_functions_are_seen():
    for path, imported in (
        (PACKAGE / "__init__.py", "cupyattn.emulator"),
        (PACKAGE / "runtime" / "backend.py", "cupyattn.runtime.device.emulated"),
    ):
        assert imported in imports(path)
        assert imported not in imports_at_import(path)


def test_modules_have_no_cycle():
    """Imports for type hints and in functions count: a module is above those that it needs."""
    graph = {
        name: {found for found in imports(path) if found in NAMES} - {name}
        for name, path in NAMES.items()
    }
    assert not (cycle := cycle_in(graph)), " -> ".join(cycle)


IMPORTING = ast.Import | ast.ImportFrom


def imports_beside_forks(tree: ast.Module) -> Iterator[int]:
    """The lines of functions that import where a fork does not wait for them."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]  # a node, and whether it runs in a call
    while pending:
        node, in_function = pending.pop()
        if isinstance(node, ast.With) and "no_fork()" in map(ast.unparse, node.items):
            continue
        calls = isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module"
        if in_function and (calls or isinstance(node, IMPORTING)):
            yield node.lineno
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending += [(child, in_function) for child in ast.iter_child_nodes(node)]


def test_imports_beside_forks_are_seen():
    kept = "def f():\n with no_fork(), other():\n  import b\n  import_module('c')\n"
    bare = "import a\ndef f():\n if 1:\n  import b\n return import_module('c')\n"
    assert not list(imports_beside_forks(ast.parse(kept)))
    assert sorted(imports_beside_forks(ast.parse(bare))) == [4, 5]


def test_a_fork_waits_for_imports_in_calls():
    """A child has an import for ever locked that another thread was at: commands have no others."""
    found = {
        name: lines
        for name, path in NAMES.items()
        if room_of(name) not in {"cli", "benchmark", "__main__"}
        and (lines := list(imports_beside_forks(tree_of(path))))
    }
    assert not found


SUBCLASSING = {"cupyattn.models.tokenizer.template_sandbox": {"jinja2"}}
"""Modules of classes that have a base in a heavy library: they too are imported when needed."""


def test_heavy_imports_are_lazy():
    found = {
        name: heavy
        for name, path in NAMES.items()
        if (heavy := LAZY.intersection(each.partition(".")[0] for each in imports_at_import(path)))
    }
    assert found == SUBCLASSING
    for path in NAMES.values():
        assert not SUBCLASSING.keys() & imports_at_import(path), path


def test_packages_for_tests_are_imported_by_testing_alone():
    importing = {
        room_of(name)
        for name, path in NAMES.items()
        if {"hypothesis", "pytest"} & {imported.partition(".")[0] for imported in imports(path)}
    }
    assert importing == {"testing"}


def test_cupy_is_imported_in_one_place():
    importing = {
        name: {imported.partition(".")[0] for imported in imports(path)} & CUPY
        for name, path in NAMES.items()
    }
    found = {name: next(iter(parts)) for name, parts in importing.items() if parts}
    assert found == MAY_IMPORT_CUPY


def test_the_reference_imports_numpy_alone():
    references = [*PACKAGE.rglob("reference.py"), *PACKAGE.rglob("reference/*.py")]
    assert len(references) > 15
    for path in references:
        for imported in imports(path):
            top = imported.partition(".")[0]
            assert top in sys.stdlib_module_names | {"numpy", "cupyattn"}, f"{path}: {imported}"


def test_models_use_public_names_alone():
    """Models use public names alone: they show how to use the library."""
    public = {each.__name__: set(each.__all__) for each in (cupyattn, cupyattn.kv_cache)}
    seen = set()
    for path in (PACKAGE / "models").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module in {"cupyattn", *public}:
                names = {alias.name for alias in node.names} - {"models"}
                assert names <= public[node.module], f"{path}: {names - public[node.module]}"
                seen |= names
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("cupyattn."):
                assert not node.module.startswith("cupyattn.kv_cache."), f"{path}: {node.module}"
    assert {"attention", "linear", "rms_norm"} <= seen


def test_the_allocator_and_the_scheduler_import_no_arrays():
    """They know ids alone, and serve other pools of blocks too."""
    pending, seen = ["allocator", "scheduler"], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        for imported in imports(PACKAGE / "kv_cache" / f"{name}.py"):
            top, _, inner = imported.partition(".")
            assert top in sys.stdlib_module_names | {"cupyattn"}, f"{name}: {imported}"
            if top == "cupyattn" and inner not in ("runtime.errors", "runtime.html"):
                folder, _, module = inner.partition(".")
                assert folder == "kv_cache", f"{name}: {imported}"
                pending += {module} - seen
    assert {"pool", "prefix_index", "requests", "sequence"} < seen


def attributes(path: Path) -> set[str]:
    """The names and attributes that a file's code (not its comments and docstrings) uses."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.Name)
    }


def test_only_runtime_loads_modules():
    module = "cuda.function.Module"
    texts = {name: path.read_text("utf-8") for name, path in NAMES.items()}
    knowing = {
        room_of(name)
        for name, text in texts.items()
        if ("RawModule" in text and "RawModule" in attributes(NAMES[name]))
        or (module in text and module in ast.unparse(tree_of(NAMES[name])))
    }
    assert knowing == {"runtime"}


def test_only_plan_starts_kernels():
    def starts(path: Path) -> bool:
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "start"
            and node.args  # a thread's takes none
            and ast.unparse(node.func.value) != "self"  # again, with its own device current
            for node in ast.walk(tree_of(path))
        )

    outside = {name: path for name, path in NAMES.items() if room_of(name) != "emulator"}
    assert {name for name, path in outside.items() if starts(path)} == {"cupyattn.runtime.plan"}


ROOT = Path(cupyattn.__file__).parent.parent


def printed_by(script: str, **variables: str) -> str:
    """Run a script in a Python of its own, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_import_loads_no_functions_and_a_first_function_no_heavy_library(tmp_path):
    cache_folder = tmp_path / "kernels"
    script = (
        "import sys, json, cupyattn; before = sorted(sys.modules); cupyattn.attention; "
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    imported, used = json.loads(printed_by(script, CUPYATTN_CACHE_DIR=str(cache_folder)))
    assert {name for name in imported if "cupyattn" in name} == {
        "cupyattn",
        "cupyattn.runtime",
        "cupyattn.runtime.fork",
    }
    assert "numpy" not in imported
    assert "cupyattn.functions" in used
    assert not [name for name in used if name.startswith(("cupyattn.emulator", "cupyattn.models"))]
    assert not {name.partition(".")[0] for name in used} & LAZY
    assert not cache_folder.exists()


def test_modules_are_imported_when_they_are_first_used():
    """Whoever generates text imports no training."""
    script = (
        "import sys, cupyattn; assert {'emulator', 'kv_cache'} < set(dir(cupyattn)); "
        "print(cupyattn.emulator.Checks.fast().races, cupyattn.emulator.__name__); "
        "import cupyattn.emulator as module; assert module is cupyattn.emulator; "
        "print(cupyattn.kv_cache.StepTables.__name__); "
        "from cupyattn import models; name = 'cupyattn.models.training'; "
        "assert 'training' in dir(models) and name in models.__doc__; "
        "assert not [each for each in sys.modules if each.startswith(name)]; "
        "print(models.training.Trainer.__name__, models.training.__name__); "
        "import cupyattn.models.training as module; assert module is models.training"
    )
    lines = printed_by(script).splitlines()
    assert lines == ["False cupyattn.emulator", "StepTables", "Trainer cupyattn.models.training"]


def test_every_public_name_is_found_where_it_is_defined():
    for name in set(cupyattn.__all__) - {"__version__"}:
        home = import_module(f"cupyattn.{cupyattn._HOMES.get(name, 'functions')}")
        assert getattr(cupyattn, name) is getattr(home, name)
        assert name in dir(cupyattn)


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
def test_no_module_replaces_a_public_function(order):
    """`cupyattn.attention` is a function, whichever modules were imported and in which order."""
    names = [
        ".".join(("cupyattn", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in MODULES
        if path.stem not in ("__init__", "__main__")
    ]
    script = (
        "import random, sys; from importlib import import_module; import cupyattn\n"
        f"names = sorted({names!r}, reverse={order == 'reversed'})\n"
        f"{order == 'shuffled'} and random.Random(0).shuffle(names)\n"
        "for name in names: import_module(name)\n"
        "public = [name for name in cupyattn.__all__ if name != '__version__']\n"
        "print([name for name in public if not callable(getattr(cupyattn, name))])\n"
        "print([name for name in public if f'cupyattn.{name}' in sys.modules])\n"
        "import cupyattn.attention\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]
    assert done.stderr.strip().endswith("No module named 'cupyattn.attention'")


@pytest.mark.parametrize("module", [cupyattn, models])
def test_an_unknown_name_raises_attribute_error(module):
    message = f"module '{module.__name__}' has no attribute 'emulators'"
    with pytest.raises(AttributeError, match=message):
        module.emulators  # noqa: B018


LAZY |= {"safetensors", "tokenizers", "gguf", "jinja2", "regex", "mpi4py", "nccl"}
