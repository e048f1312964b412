"""Sphinx: the API reference from the docstrings; CONTRIBUTING has the command.

A name in backquotes in a docstring is a public name, or a parameter of what is documented; with -n
and -W any other is an error.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import pick_math_environment
from docutils.utils.math.latex2mathml import tex2mathml
from numpydoc import xref
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, also where it is installed
import cupyattn

# A name of two modules is documented in the first.
MODULES = (
    "cupyattn",
    "cupyattn.autodiff",
    "cupyattn.models",
    "cupyattn.distributed",
    "cupyattn.emulator",
    "cupyattn.turing",
    "cupyattn.kv_cache",
    "cupyattn.testing",
)
CLASSES = {
    name: f"{module}.{name}"
    for module in reversed(MODULES)
    for name in import_module(module).__all__
    if isinstance(getattr(import_module(module), name), type)
}

for name in cupyattn.__all__:  # differentiable functions say where they are public: viewcode needs
    function = getattr(cupyattn, name)  # the module that has their source
    if hasattr(function, "__wrapped__"):
        function.__module__ = function.__wrapped__.__module__

project = "cupyattn"
author = copyright = "The cupyattn developers"
release = version = cupyattn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
]
default_role = "py:obj"
templates_path = ["templates"]
exclude_patterns = ["templates"]

autodoc_typehints = "none"  # the docstrings have the types, with shapes
numpydoc_show_class_members = False  # autodoc shows them
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # of a type's words, links are this library's classes alone
numpydoc_xref_aliases = CLASSES
xref.DEFAULT_LINKS.clear()  # Python's and NumPy's, whose pages a build without a network has not

smartquotes = False  # "flash" is a value
html_theme = "furo"
html_title = f"cupyattn {release}"
html_show_sphinx = False
html_math_renderer = "mathml"
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Tell Sphinx what this project's docstrings mean."""
    shutil.rmtree(Path(__file__).parent / "names", ignore_errors=True)  # pages of an older build
    # Browsers show MathML: pages need neither a script nor a network.
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)


def inline_math(translator: Any, node: nodes.math) -> None:
    """Write a formula within a sentence."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    """Write formulas of their own lines; a blank line separates them."""
    for formula in node.astext().split("\n\n"):
        if pick_math_environment(formula) == "align*":
            formula = f"\\begin{{aligned}}{formula}\\end{{aligned}}"
        mathml = tex2mathml(formula, as_block=True)
        mathml = mathml.replace("<mtable", '<mtable displaystyle="true"')  # or fractions are tiny
        translator.body.append(f'<div class="math">{mathml}</div>')
    raise nodes.SkipNode


def resolve(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Node | None:
    """Find a name that Sphinx does not: a parameter, a name of another module, a field."""
    page, target = node.get("refdoc", ""), node["reftarget"]
    if target in parameters(page):
        return nodes.literal(text=target)
    name, _, attribute = target.removeprefix("cupyattn.kv_cache.").partition(".")
    full = CLASSES.get(name)
    if full is None:
        return None
    domain = env.get_domain("py")
    found = domain.resolve_xref(
        env, page, app.builder, "obj", f"{full}.{attribute}" if attribute else full, node, content
    )
    if found is None and attribute in getattr(documented(full), "__annotations__", ()):
        found = domain.resolve_xref(env, page, app.builder, "obj", full, node, content)
    return found


def skip(_app: Sphinx, _what: str, _name: str, member: Any, _skip: bool, _options: Any) -> Any:
    """Leave out the fields of named tuples that say only their number; docstrings list them."""
    return True if "Alias for field number" in (getattr(member, "__doc__", None) or "") else None


def documented(full: str) -> Any:
    """Return what a page is about."""
    module, _, name = full.rpartition(".")
    return getattr(import_module(module), name)


@cache
def parameters(page: str) -> frozenset[str]:
    """Return the names of the parameters on a page: of its function, or its class's methods."""
    if not page.startswith("names/"):
        return frozenset()
    about = documented(page.removeprefix("names/"))
    members = [about, *vars(about).values()] if isinstance(about, type) else [about]
    return frozenset(
        name
        for member in members
        if isinstance(member, type) or inspect.isfunction(member)
        for name in inspect.signature(member).parameters
    )
