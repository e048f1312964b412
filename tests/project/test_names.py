"""The public names: parameters and defaults, documentation, a page of the API reference each.

Also docstrings, which say what a thing is or does from their first word on.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import cupyattn
from cupyattn import (
    AttentionGrads,
    BlockMask,
    OutOfBlocksError,
    Sequence,
    attention,
    attention_backward,
    cross_entropy,
    cross_entropy_backward,
    linear,
    linear_backward,
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_gelu,
    linear_gelu_backward,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    merge_attention,
    paged_attention,
    softmax_backward,
)
from cupyattn import softmax as softmax_forward
from cupyattn.kv_cache import Request, StepTables, Work
from cupyattn.runtime.arrays import Array

SHARED_OPTIONS = {
    "causal": False, "softmax_scale": None, "window_size": None, "q_offset": None,
    "seqused_k": None, "mask": None, "bias": None, "alibi_slopes": None, "softcap": None,
    "sinks": None, "dropout_p": 0.0, "seed": None, "rotary": None, "score_mod": None,
    "mask_mod": None,
}  # fmt: skip
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""By position or by name: there are so many."""
LOSS_OPTIONS = {
    "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean",
}  # fmt: skip
SCORE_OPTIONS = {"axis": -1, "scale": 1.0, "mask": None, "bias": None, "causal": False}
SIGNATURES: dict[Callable[..., Any], tuple[tuple[str, ...], dict[str, Any]]] = {
    attention: (
        ("q", "k", "v"),
        {**SHARED_OPTIONS, "return_lse": False, "implementation": "flash",
         "accumulator": "float32", "out": None,
         "workspace": None},
    ),
    attention_backward: (
        ("dout", "q", "k", "v", "out", "lse"),
        {**SHARED_OPTIONS, "dlse": None, "deterministic": False,
         "implementation": "flash", "grads": None,
         "accumulate": False, "workspace": None},
    ),
    cupyattn.attention_varlen: (
        (*("q", "k", "v"), *PACKED),
        {**SHARED_OPTIONS, "return_lse": False, "accumulator": "float32", "out": None,
         "workspace": None},
    ),
    cupyattn.attention_varlen_backward: (
        (*("dout", "q", "k", "v", "out", "lse"), *PACKED),
        {**SHARED_OPTIONS, "dlse": None, "deterministic": False, "grads": None,
         "accumulate": False, "workspace": None},
    ),
    paged_attention: (
        ("q", "k_cache", "v_cache", "block_table", "seqlens_k"),
        {"cu_seqlens_q": None, "max_seqlen_q": 1, "causal": False, "softmax_scale": None,
         "window_size": None, "softcap": None, "sinks": None, "alibi_slopes": None,
         "k_scales": None, "v_scales": None, "return_lse": False, "accumulator": "float32",
         "out": None, "workspace": None},
    ),
    cupyattn.block_mask: (("mask_mod", "Sq", "Sk"), {"B": 1, "H": 1, "q_offset": None}),
    cupyattn.append_kv: (
        ("k_cache", "v_cache", "k", "v", "slot_mapping"),
        {"q": None, "rotary": None, "positions": None, "q_norm": None, "k_norm": None,
         "k_scales": None, "v_scales": None, "k_centre": None},
    ),
    cupyattn.copy_blocks: (
        ("k_cache", "v_cache", "copies"), {"k_scales": None, "v_scales": None},
    ),
    cupyattn.gather: (
        ("k_cache", "v_cache", "block_table", "seqlens_k"),
        {"max_seqlen_k": None, "k_scales": None, "v_scales": None, "dtype": None, "out": None},
    ),
    merge_attention: (("out_a", "lse_a", "out_b", "lse_b"), {"out": None}),
    cupyattn.gelu: (("x",), {"approximate": "none", "out": None}),
    cupyattn.gelu_backward: (
        ("dout", "x"), {"approximate": "none", "grads": None, "accumulate": False},
    ),
    cupyattn.silu: (("x",), {"out": None}),
    cupyattn.silu_backward: (("dout", "x"), {"grads": None, "accumulate": False}),
    cupyattn.swiglu: (("gate", "up"), {"out": None}),
    cupyattn.swiglu_backward: (("dout", "gate", "up"), {"grads": None, "accumulate": False}),
    cupyattn.geglu: (("gate", "up"), {"approximate": "none", "out": None}),
    cupyattn.geglu_backward: (
        ("dout", "gate", "up"), {"approximate": "none", "grads": None, "accumulate": False},
    ),
    cupyattn.dropout: (("x", "p", "seed"), {"residual": None, "out": None}),
    cupyattn.dropout_backward: (("dout", "p", "seed"), {"grads": None, "accumulate": False}),
    cupyattn.rope: (
        ("x", "cos", "sin"),
        {"positions": None, "interleaved": False, "inverse": False, "out": None},
    ),
    cupyattn.rope_backward: (
        ("dout", "cos", "sin"),
        {"positions": None, "interleaved": False, "inverse": False, "grads": None,
         "accumulate": False},
    ),
    cupyattn.embedding: (("table", "ids"), {"scale": None, "out": None}),
    cupyattn.embedding_backward: (
        ("dout", "table", "ids"), {"grads": None, "accumulate": False, "workspace": None},
    ),
    cupyattn.adamw_step: (
        ("param", "grad", "m", "v"),
        {"step": inspect.Parameter.empty, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
         "weight_decay": 0.01, "grad_scale": 1.0},
    ),
    cupyattn.add_to: (("total", "x"), {}),
    cupyattn.adamw_step_8bit: (
        ("param", "grad", "m", "v", "m_scales", "v_scales"),
        {"step": inspect.Parameter.empty, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
         "weight_decay": 0.01, "grad_scale": 1.0},
    ),
    cupyattn.sample: (
        ("logits",),
        {"seed": inspect.Parameter.empty, "step": 0, "temperature": 1.0, "top_k": None,
         "top_p": None, "min_p": None, "repetition_penalty": 1.0, "previous": None, "out": None,
         "workspace": None},
    ),
    **dict.fromkeys(
        (softmax_forward, log_softmax, logsumexp), (("x",), {**SCORE_OPTIONS, "out": None})
    ),
    **dict.fromkeys(
        (softmax_backward, log_softmax_backward),
        (
            ("dout", "out"),
            {"axis": -1, "scale": 1.0, "bias": None, "grads": None, "accumulate": False,
             "workspace": None},
        ),
    ),
    cross_entropy: (
        ("logits", "labels"),
        {**LOSS_OPTIONS, "return_lse": False, "out": None, "workspace": None},
    ),
    cross_entropy_backward: (
        ("dloss", "logits", "labels", "lse"),
        {**LOSS_OPTIONS, "dlse": None, "dlogits": None, "accumulate": False, "workspace": None},
    ),
    linear_cross_entropy: (
        ("x", "w", "labels"),
        {**LOSS_OPTIONS, "return_lse": False, "logits_bytes": 2**28, "out": None,
         "workspace": None},
    ),
    linear_cross_entropy_backward: (
        ("dloss", "x", "w", "labels", "lse"),
        {**LOSS_OPTIONS, "dlse": None, "logits_bytes": 2**28, "grads": None, "accumulate": False,
         "workspace": None},
    ),
    logsumexp_backward: (
        ("dout", "x", "out"), {**SCORE_OPTIONS, "grads": None, "accumulate": False},
    ),
    cupyattn.layer_norm: (
        ("x", "weight", "bias"),
        {"residual": None, "x_scale": None, "eps": 1e-5, "return_stats": False, "quantize": None,
         "rotation": None, "out": None},
    ),
    cupyattn.layer_norm_backward: (
        ("dout", "x", "weight", "mean", "rstd"),
        {"bias": None, "dtotal": None, "grads": None, "accumulate": False, "workspace": None},
    ),
    cupyattn.rms_norm: (
        ("x", "weight"),
        {"residual": None, "x_scale": None, "x_norm": None, "eps": 1e-6, "weight_offset": 0.0,
         "return_stats": False, "quantize": None, "rotation": None, "out": None},
    ),
    cupyattn.rms_norm_backward: (
        ("dout", "x", "weight", "rstd"),
        {"weight_offset": 0.0, "dtotal": None, "grads": None, "accumulate": False,
         "workspace": None},
    ),
    linear: (
        ("x", "w", "b"),
        {"activation": None, "residual": None, "activations": None, "return_preactivation": False,
         "out": None, "workspace": None},
    ),
    cupyattn.matmul: (("a", "b"), {"out": None}),
    cupyattn.quantize: (
        ("w",),
        {"format": "nf4", "block_size": None, "rotation": None, "out": None, "workspace": None},
    ),
    cupyattn.quantize_keys: (
        ("k",),
        {"centre": None, "cu_seqlens": None, "seqused_k": None, "rotary": None,
         "positions": None, "q": None, "out": None},
    ),
    cupyattn.quantize_rows: (("x",), {"rotation": None, "out": None}),
    cupyattn.dequantize: (("weight",), {"dtype": None, "out": None, "workspace": None}),
    linear_backward: (
        ("dout", "x", "w", "b"),
        {"activation": None, "preactivation": None, "grads": None, "accumulate": False,
         "workspace": None},
    ),
    linear_gelu: (
        ("x", "w", "b"),
        {"approximate": "tanh", "return_preactivation": False, "out": None, "workspace": None},
    ),
    linear_gelu_backward: (
        ("dout", "x", "w", "b"),
        {"approximate": "tanh", "preactivation": None, "grads": None, "accumulate": False,
         "workspace": None},
    ),
}  # fmt: skip
MADE_BY_OTHERS = (BlockMask, OutOfBlocksError, Sequence)
"""Classes whose objects a caller gets, but does not make."""


def test_gradients_may_be_of_any_library_and_left_out():
    """The annotations of `AttentionGrads`: it is an argument too, and CuPy's on a GPU."""
    hints = get_type_hints(AttentionGrads)
    assert list(hints) == ["dq", "dk", "dv", "dbias", "dsinks"]
    for hint in hints.values():
        assert hint is Array or set(get_args(hint)) == {Array, type(None)}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_names_and_defaults(function):
    """Arrays by position alone, options by name alone."""
    parameters = inspect.signature(function).parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    either = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert either in ((), PACKED)
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert (positional, options) == SIGNATURES[function]
    assert list(options) == list(SIGNATURES[function][1])
    assert len(parameters) == len(positional) + len(options)
    assert all(p.annotation is not p.empty for p in parameters)


def sections(docstring: str) -> dict[str, str]:
    """The text of each numpydoc section, by its heading."""
    heading = re.compile(r"^(\w[\w ]*)\n-+\n", re.MULTILINE)
    pieces = heading.split(inspect.cleandoc(docstring))
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.parametrize("name", sorted(set(cupyattn.__all__) - {"__version__"}))
def test_public_names_are_documented(name):
    """A one-line summary, then numpydoc sections that name every parameter or field."""
    public = getattr(cupyattn, name)
    assert public.__doc__, name
    assert inspect.cleandoc(public.__doc__).partition("\n")[0].endswith((".", "``."))
    found = sections(public.__doc__)
    if hasattr(public, "_fields"):
        described, wanted = found.get("Attributes", ""), list(public._fields)
    elif public in MADE_BY_OTHERS:
        described, wanted = "", []
    else:
        is_context = inspect.isgeneratorfunction(inspect.unwrap(public))
        assert "Returns" in found or is_context or inspect.isclass(public)
        assert "Examples" in found
        wanted = list(inspect.signature(public).parameters)
        described = found.get("Parameters", "")
        assert not wanted or "Raises" in found
    names = re.findall(r"^\*{0,2}([\w, ]+?)(?: : .*)?$", described, re.MULTILINE)
    assert [n.strip() for line in names for n in line.split(",") if n.strip()] == wanted


def words_of(name: str) -> list[str]:
    """The words of a file's or a folder's name, of several things as of one."""
    return [word.removesuffix("s") for word in name.split("_") if word]


def repeats_its_folder(path: Path) -> bool:
    folder, own = words_of(path.parent.name), words_of(path.stem)
    return any(own[i : i + len(folder)] == folder for i in range(len(own) - len(folder) + 1))


def test_no_file_repeats_its_folders_name():
    """The folder has said it: what is in it says what else it is."""
    for path in ("models/model.py", "kv_cache/test_kv_cache_memory.py", "linear/test_linear.py"):
        assert repeats_its_folder(Path(path))
    for more in ("kv_cache/test_paged_cache.py", "models/modelling.py", "norms/test_calls.py"):
        assert not repeats_its_folder(Path(more))
    root = Path(__file__).parents[2]
    files = [
        path
        for folder in ("cupyattn", "cuda_src", "tests", "notebooks")
        for path in (root / folder).rglob("*.*")
        if path.suffix in (".py", ".cu", ".cuh", ".ipynb")
    ]
    assert len(files) > 700
    assert not [str(path.relative_to(root)) for path in files if repeats_its_folder(path)]


def classes_of(folder: Path) -> Iterator[tuple[str, str]]:
    """The name of each class in a folder's modules, and where it is."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path.relative_to(folder)}:{node.lineno}"


def used_twice(classes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The places of each class name that several classes have."""
    places = defaultdict[str, list[str]](list)
    for name, place in classes:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_class_name_is_unique_in_the_package():
    classes = [*classes_of(Path(cupyattn.__file__).parent)]
    assert len(classes) > 300
    assert used_twice([*classes, classes[0]])
    assert used_twice(classes) == {}


def test_version_is_a_release():
    assert re.fullmatch(r"\d+\.\d+\.\d+", cupyattn.__version__)


@pytest.mark.parametrize(
    ("public", "types"),
    [(cupyattn.PagedKVCache, {StepTables}), (cupyattn.Scheduler, {Request, Work})],
)
def test_help_says_where_the_types_of_the_cache_are(public, types):
    seen = sections(public.__doc__)["See Also"]
    named = re.findall(r"^(cupyattn[.\w]+) : \w.*\.$", seen, re.MULTILINE)
    assert len(named) == len(seen.strip().splitlines())
    assert types <= {pkgutil.resolve_name(name) for name in named}


PAGES = Path(__file__).resolve().parent.parent.parent / ".github" / "reference"
MODULES = (
    "cupyattn",
    "cupyattn.autodiff",
    "cupyattn.models",
    "cupyattn.models.training",
    "cupyattn.distributed",
    "cupyattn.emulator",
    "cupyattn.turing",
    "cupyattn.kv_cache",
    "cupyattn.testing",
)
WHERE = re.compile(r"^\.\. currentmodule:: (\S+)$", flags=re.MULTILINE)
NAMED = re.compile(r"^(?:   |\.\. data:: )([A-Za-z]\w*)$", flags=re.MULTILINE)


def names_on(page: str) -> list[str]:
    """The public names in a page's tables."""
    _, *parts = WHERE.split(page)
    return [
        f"{module}.{name}"
        for module, text in zip(parts[::2], parts[1::2], strict=True)
        for name in NAMED.findall(text)
    ]


def test_names_are_found_in_tables_and_as_data():
    page = (
        ".. toctree::\n\n   other\n\n.. currentmodule:: a.b\n\n.. autosummary::\n   :toctree: x\n"
    )
    assert names_on(f"{page}\n   one\n\n.. data:: TWO\n\n   Some words.\n") == [
        "a.b.one",
        "a.b.TWO",
    ]


def test_every_public_name_has_one_page():
    if not PAGES.exists():
        pytest.skip("this is not a checkout: .github/reference is not here")
    found = Counter(
        name for path in PAGES.glob("*.rst") for name in names_on(path.read_text("utf-8"))
    )
    objects = {}  # the first name of each: what two modules have is documented in the first
    for module in map(import_module, MODULES):
        for name in module.__all__:
            objects.setdefault(id(getattr(module, name)), f"{module.__name__}.{name}")
    objects.pop(id(import_module("cupyattn").__version__))
    assert found == Counter(objects.values())


PACKAGE = Path(cupyattn.__file__).parent
VAGUE = ("Of ", "The same", "What ")
"""Beginnings that leave out what the thing is: a reader needs a second reading."""

Body = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring with its line: of modules, classes, functions, constants and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Body):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str):
                        yield statement.lineno, text.lstrip()


def vague(source: str) -> list[str]:
    """The line and the first line of each docstring with a vague beginning."""
    return [
        f"{line}: {text.splitlines()[0]}"
        for line, text in sorted(docstrings(source))
        if text.startswith(VAGUE)
    ]


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module does."""',
        'class Call:\n    """Of a call."""',
        'class Call:\n    rows: int\n    """Of a call."""',
        'def _call():\n    """The same for a call."""',
        'async def call():\n    """\n    What is called.\n    """',
        'def call():\n    def within():\n        """What is called."""',
        'ROWS = 4\n"""Of a call."""',
    ],
)
def test_vague_beginning_is_found(source):
    assert len(vague(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of a call. What follows is fine."""',
        'def call():\n    """Return the same."""\n    return """What a text."""',
    ],
)
def test_other_strings_are_not_found(source):
    assert not vague(source)


def test_docstrings_begin_with_what_a_thing_is_or_does():
    """Begin with a noun phrase for a class or a constant, with an imperative for a function."""
    found = [
        f"{path}:{line}"
        for folder in (PACKAGE, Path(__file__).parents[1])
        for path in sorted(folder.rglob("*.py"))
        for line in vague(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)
