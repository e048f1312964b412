"""Jinja's sandbox with limits: operations of unbounded time or memory are missing or checked first.

A template is rewritten before it is compiled, so that loops, literals, slices and comparisons are
counted; the sandbox intercepts operators and calls. Nothing is computed during compilation. `text`
imports this module, and with it jinja2, when it needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, ModuleType

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cupyattn.models.tokenizer.template_budget import (
    ExceededError,
    TemplateBudget,
    TemplateValue,
    current,
)

_SEARCHED = 1 << 30
"""The worst cost of a search from the right, or of stripping: the product of both lengths."""

_PLAIN = """capitalize casefold endswith isalnum isalpha isascii isdecimal isdigit isidentifier
islower isnumeric isprintable isspace istitle isupper lower removeprefix removesuffix splitlines
startswith swapcase title upper"""


def require_method(
    budget: TemplateBudget, method: TemplateValue, given: tuple[object, ...], named: dict
) -> tuple:
    """Check a call of a method of Python's own types; return its positional arguments."""
    owner = getattr(method, "__self__", None)
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    written_in_c = isinstance(method, BuiltinMethodType)
    if kind is None:
        is_builtin = type(owner).__module__ == "builtins" and not isinstance(owner, ModuleType)
        if written_in_c and is_builtin:
            raise ExceededError(f"it calls {type(owner).__name__}.{method.__name__}")
        return given
    if not (written_in_c or kind is str):  # of a class of the caller's own
        return given
    if method.__name__ not in _METHODS[kind]:
        raise ExceededError(f"it calls {kind.__name__}.{method.__name__}")
    check = _METHODS[kind][method.__name__]
    return given if check is None else check(budget, owner, *given, **named)


def require_replaced(
    budget: TemplateBudget, text: str, old: str, new: str, count: int = -1
) -> tuple:
    """Refuse a replacement whose result would be too long."""
    found = text.count(old)
    times = min(found, count) if count >= 0 else found
    budget.require_room(len(text) + times * len(new))
    return (old, new, count)


def joined(
    budget: TemplateBudget, glue: str, parts: Iterable[TemplateValue]
) -> list[TemplateValue]:
    """Return the parts of a text that is not too long."""
    found = budget.listed(parts)
    budget.require_room(budget.size(found) + len(glue) * len(found))
    return found


def require_stripped(budget: TemplateBudget, text: str, characters: object = None) -> tuple:
    """Refuse to strip too many characters from too long a text."""
    return _search(budget, text, characters)


def _join_method(budget: TemplateBudget, glue: str, parts: Iterable[TemplateValue]) -> tuple:
    return (joined(budget, glue, parts),)


def _width(budget: TemplateBudget, text: str, width: int, *fill: str) -> tuple:
    budget.require_room(width)
    return (width, *fill)


def _tabs(budget: TemplateBudget, text: str, tabsize: int = 8) -> tuple:
    budget.require_room(len(text) + text.count("\t") * max(tabsize, 0))
    return (tabsize,)


def _search(budget: TemplateBudget, text: str, part: object = "", *given: object) -> tuple:
    if isinstance(part, str) and len(text) * len(part) > _SEARCHED:
        raise ExceededError("it looks for too long a text in too long a text")
    return (part, *given)


def _split(
    budget: TemplateBudget, text: str, sep: object = None, maxsplit: int = -1, **_: object
) -> tuple:
    return (*_search(budget, text, sep), maxsplit)


def _named(names: str, check: Callable[..., tuple] | None = None) -> dict[str, TemplateValue]:
    return dict.fromkeys(names.split(), check)


_METHODS: dict[type, dict[str, TemplateValue]] = {
    str: {
        **_named(_PLAIN),
        **_named("find index rfind rindex count partition rpartition", _search),
        **_named("lstrip rstrip strip", require_stripped),
        "split": _split,
        "rsplit": _split,
        "replace": require_replaced,
        "join": _join_method,
        **_named("center ljust rjust zfill", _width),
        "expandtabs": _tabs,
    },
    bytes: {},
    int: _named("bit_length is_integer"),
    float: _named("is_integer"),
    list: _named("copy count index"),
    tuple: _named("count index"),
    dict: _named("copy get items keys values"),
}


_LINEAR = """abs attr capitalize count d default dictsort e escape first float groupby items last
length lower map max min random reject rejectattr reverse safe select selectattr sort title
truncate unique upper wordcount"""
_MOST_DIGITS = 4300  # Python's own limit, which releases before 3.10.7 lack
_MOST_PATTERN = 1000
_MOST_COPIES = 1 << 19
_MOST_PRECISION = 300
_SCOPES = {"_loop_vars", "_block_vars"}  # which Jinja adds to the arguments of a call
_MADE, _STEP, _TEXT = "made here", "step here", "text here"  # no template can write these names
_ANSWER = "answer here"


class _Generation(Extension):
    """The tag ``{% generation %}`` of transformers: what is within it is an answer of the model.

    Names that the block sets are unknown after it. The budget notes where the answer begins and
    ends in the text, but not in a macro or a block that is captured: their text is not yet part of
    it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Read a block up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_mark(True, line), nodes.Scope(body, lineno=line), _mark(False, line)]


def _mark(begins: bool, line: int) -> nodes.Node:
    return nodes.ExprStmt(_through(_ANSWER, nodes.Const(begins, lineno=line)), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates: transformers' functions, within a `TemplateBudget`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_output, cache_size=0,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )  # fmt: skip
        self.filters = {name: _counted(FILTERS[name]) for name in _LINEAR.split()} | _FILTERS
        self.tests = {name: _counted(test) for name, test in TESTS.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": _now,
        }

    def _generate(
        self, source: nodes.Template, *given: TemplateValue, **named: TemplateValue
    ) -> TemplateValue:
        # Jinja copies all names for each branch. The longest templates have some 300 of both.
        branches = sum(1 for _ in source.find_all(nodes.If))
        names = {each.name for each in source.find_all(nodes.Name)}
        if branches * len(names) > _MOST_COPIES:
            raise ExceededError(f"it has {branches} branches and {len(names)} names")
        return super()._generate(_Counting().visit(source), *given, **named)

    def call_binop(
        self, context: TemplateValue, operator: str, left: object, right: object
    ) -> TemplateValue:
        """Apply an operator to operands whose result is not too long."""
        budget = current()
        budget.require_operation(operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(
        __self,  # noqa: N805
        __context: TemplateValue,
        __obj: TemplateValue,
        *args: TemplateValue,
        **kwargs: object,
    ) -> TemplateValue:
        """Call a function, a macro, or a method that templates may call."""
        budget = current()
        named = {name: value for name, value in kwargs.items() if name not in _SCOPES}
        if getattr(__obj, "catch_varargs", False) or getattr(__obj, "catch_kwargs", False):
            budget.size((args, named))  # which the macro sees as a tuple and a dict
        checked = require_method(budget, __obj, args, named)
        if checked is not args:
            return budget.made(__obj(*checked))
        with budget.deeper():
            return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: TemplateValue) -> TemplateValue:
        """Return ``str.format`` with limits for the method of a string, None for all else."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or value.__name__ not in ("format", "format_map"):
            return None
        is_map = value.__name__ == "format_map"

        @wraps(value)
        def write(*given: TemplateValue, **named: TemplateValue) -> str:
            if is_map:
                (named,), given = given, ()
            current().require_format(owner, (given, named))
            return _Formatter(self).vformat(str(owner), given, named)

        return write


class _Formatter(SandboxedFormatter):
    def format_field(self, value: object, format_spec: str) -> TemplateValue:
        current().require_width(format_spec)
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """Jinja's namespace, written without its items: these may contain it."""

    def __init__(self, /, *given: object, **named: object) -> None:
        super().__init__(*_pairs(given), **named)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Counting(NodeTransformer):
    """A rewriter of templates that counts loops, static text and literals."""

    _captured = False
    """Whether the text of the node is kept for a later use, not written at once."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self._visit_captured(node) if node.recursive else self.generic_visit(node)
        node.body.insert(0, _statement(1))
        return node

    def _visit_captured(self, node: TemplateValue) -> nodes.Node:
        outer, self._captured = self._captured, True
        self.generic_visit(node)
        self._captured = outer
        return node

    visit_Macro = visit_CallBlock = _visit_captured  # noqa: N815
    visit_AssignBlock = visit_FilterBlock = _visit_captured  # noqa: N815

    def visit_ExprStmt(self, node: nodes.ExprStmt) -> nodes.Node | None:  # noqa: N802
        self.generic_visit(node)
        marks = isinstance(node.node, nodes.Filter) and node.node.name == _ANSWER
        return None if marks and self._captured else node

    def visit_Output(self, node: nodes.Output) -> TemplateValue:  # noqa: N802
        self.generic_visit(node)
        size = sum(len(each.data) for each in node.nodes if isinstance(each, nodes.TemplateData))
        return [_statement(size), node] if size else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_through(_TEXT, each) for each in node.nodes]
        return _through(_MADE, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_STEP, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def _literal(self, node: TemplateValue) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        plain = all(isinstance(each, nodes.Const) for each in node.items)
        return node if plain else _through(_MADE, node)

    visit_List = visit_Tuple = visit_Dict = _literal  # noqa: N815

    def visit_ScopedEvalContextModifier(self, node: TemplateValue) -> nodes.Node:  # noqa: N802
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            raise TemplateError("autoescape takes true or false")  # read while it is compiled
        self.generic_visit(node)
        return node


def _through(name: str, node: TemplateValue) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _statement(size: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_through(_STEP, nodes.Const(size, lineno=1)), lineno=1)


def _step(value: object) -> TemplateValue:
    """Count a comparison, or a round of a loop, or the static text of this size."""
    current().spend(value if type(value) is int else 1)
    return value


def _answer(begins: bool) -> None:
    current().mark_answer(begins)


def _made(value: object) -> TemplateValue:
    return current().made(value)


def _text(value: object) -> TemplateValue:
    """Return a value as text that is not too long; text as it is."""
    if isinstance(value, str):
        return value
    current().size(value)
    return current().made(str(value))


@pass_context  # otherwise Jinja would compute constants while it compiles
def _output(context: object, value: object) -> TemplateValue:
    return current().made(_text(value))


def _counted(function: TemplateValue) -> Callable[..., object]:
    @wraps(function)
    def count(*given: TemplateValue, **named: object) -> object:
        return current().made(function(*given, **named))

    return count


def _list(value: TemplateValue) -> list[object]:
    return _made(current().listed(value))


@pass_context
def _join(context: object, value: object, d: str = "", attribute: object = None) -> str:
    parts = _list(value)
    if attribute is not None:
        parts = _list(FILTERS["map"](context, parts, attribute=attribute))
    glue = _text(d)
    return _made(str(glue).join(map(str, joined(current(), glue, parts))))


def _dict(*given: object, **named: object) -> dict[TemplateValue, TemplateValue]:
    return dict(*_pairs(given), **named)


def _pairs(given: tuple[TemplateValue, ...]) -> Iterator[object]:
    """Pass on what a dict is made of, a step for each pair: keys of one hash take ever longer."""
    for each in given:
        yield each if isinstance(each, Mapping) else current().counted(each)


def _trim(value: object, chars: object = None) -> str:
    text = _text(value)
    return _made(text.strip(*require_stripped(current(), text, chars)))


def _replace(s: object, old: object, new: object, count: int | None = None) -> str:
    text = _text(s)
    wanted = require_replaced(
        current(), text, _text(old), _text(new), -1 if count is None else count
    )
    return _made(text.replace(*wanted))


def _round(value: object, precision: int = 0, method: object = "common") -> TemplateValue:
    if abs(precision) > _MOST_PRECISION:
        raise ExceededError(f"it rounds to {_MOST_PRECISION} digits or more")
    return _made(FILTERS["round"](value, precision, method))


def _int(value: object, default: object = 0, base: int = 10) -> TemplateValue:
    if isinstance(value, str) and len(value) > _MOST_DIGITS:
        raise ExceededError(f"it reads an integer of more than {_MOST_DIGITS} digits")
    return _made(FILTERS["int"](value, default, base))


@pass_context
def _sum(
    context: TemplateValue, iterable: TemplateValue, attribute: object = None, start: object = 0
) -> object:
    if not isinstance(start, int | float):  # lists would be copied once for each
        raise ExceededError("it sums values that are not numbers")
    return _made(FILTERS["sum"](context.environment, current().counted(iterable), attribute, start))


def _format(value: object, *given: object, **named: object) -> str:
    text = _text(value)
    current().require_percent(text, named or given)
    return _made(FILTERS["format"](text, *given, **named))


def _indent(
    s: TemplateValue, width: TemplateValue = 4, first: bool = False, blank: bool = False
) -> str:
    text = _text(s)
    size = len(width) if isinstance(width, str) else width
    current().require_room(len(text) + (len(text.splitlines()) + 1) * max(size, 0))
    return _made(FILTERS["indent"](text, width, first, blank))


def _to_json(
    value: TemplateValue,
    ensure_ascii: bool = False,
    indent: TemplateValue = None,
    separators: TemplateValue = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON, with the options of transformers and in their order."""
    size = len(indent) if isinstance(indent, str) else indent or 0
    budget = current()
    budget.size(value)
    budget.require_room(size)
    if separators is not None and [*map(type, separators)] != [str, str]:
        raise TemplateError("separators of tojson are two texts: between items, and after keys")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts, length = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        length += len(part)
        budget.spend(len(part))
        budget.require_room(length)
    return "".join(parts)


def _refuse(message: str) -> None:
    raise TemplateError(_text(message))


def _now(pattern: str) -> str:
    if len(pattern) > _MOST_PATTERN:
        raise ExceededError(f"it writes a date by more than {_MOST_PATTERN} characters")
    return datetime.now().strftime(pattern)


_FILTERS = {
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "string": _text,
    "sum": _sum,
    "tojson": _to_json,
    "trim": _trim,
    _ANSWER: _answer,
    _MADE: _made,
    _STEP: _step,
    _TEXT: _text,
}
