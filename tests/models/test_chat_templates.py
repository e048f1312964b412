"""Chat templates: usual ones, and those that would run or grow without end."""

from __future__ import annotations

import json
import time
from threading import Thread

import pytest

jinja2 = pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")

from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

from cupyattn.models.tokenizer import (  # noqa: E402
    template_budget,
    tokenizer_of_folder,
    tokenizer_of_gguf,
)
from cupyattn.models.tokenizer.text import MOST_TEMPLATE, rendered  # noqa: E402

TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": " The weather <é> ",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}},
        },
    },
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Weather in Paris? "},
    {
        "role": "assistant", "content": "<think>\nParis\n</think>\n\nI look.",
        "tool_calls": [
            {"id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
        ],
    },
    {"role": "tool", "content": "20 degrees"},
    {"role": "assistant", "content": "20 degrees & sun"},
    {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
]  # fmt: skip

# What the templates of Llama, Qwen, Gemma, Mistral, DeepSeek and SmolLM do, in small pieces.
USUAL = [
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' + m['content']|string|trim }}\n{% endfor %}",
    "{%- set ns = namespace(last=-1, text='') %}{% for m in messages[::-1] %}"
    "{%- set i = messages|length - 1 - loop.index0 %}{% if m.role == 'user' and ns.last < 0 %}"
    "{%- set ns.last = i %}{% endif %}{% set ns.text = ns.text + m.role[0] %}{% endfor %}"
    "{{ ns.last }} {{ ns.text }}",
    "{% for m in messages if m.content is string and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}|{{ m.content.split('<think>')|last }}|"
    "{{ m.content.split('</think>')[0].rstrip('\n').replace('\n', ' ').strip() }}{% endfor %}",
    "{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function | tojson(indent=4) }}"
    "{{ tool.function.parameters | tojson | string | indent(2) }}{% endfor %}",
    "{%- macro schema(p) -%}{% for k, v in p | dictsort %}{{ k }}:"
    "{% if v is mapping %}{{ '{' ~ schema(v) ~ '}' }}{% elif v is string %}{{ v|upper }}"
    "{% else %}{{ v | join(', ') }}{% endif %}{{ ',' if not loop.last }}{% endfor %}"
    "{%- endmacro %}{{ schema(tools[0].function.parameters) }}",
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users|length }}"
    "{{ users[-1] == messages[-1] }}{{ messages | map(attribute='role') | unique | join('-') }}"
    "{% set rest = [] %}{% for m in messages | rejectattr('role', 'in', ['tool', 'system']) %}"
    "{% set rest = rest + [m] %}{% endfor %}{{ rest | length }}",
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}{{ m.role.title() }}"
    "{% endif %}{% if not loop.last and loop.nextitem.role == 'tool' %}!{% break %}{% endif %}"
    "{{ loop.index0 % 2 == 0 }}{% endfor %}",
    "{% for call in messages[2].tool_calls %}{% for k, v in call.function.arguments.items() %}"
    "{{ '<%s=%s>' | format(k, v) }}{{ '<{}={:>8}>'.format(k, v) }}{{ '%-8s|' % k }}{% endfor %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id[-9:] + '\"}' }}{% endfor %}",
    "{% if messages[5].content is iterable and messages[5].content is not string %}"
    "{% for part in messages[5].content %}{{ part.text | default('', true) }}{% endfor %}"
    "{% endif %}"
    "{{ tools | length }}{{ absent is defined }}{{ absent or 'x' }}{{ 1024 // 3 }}{{ 2 ** 5 }}",
    "{% set text %}{% for m in messages %}{{ m.role }},{% endfor %}{% endset %}{{ text * 2 }}"
    "{% macro w(a, b='z') %}{{ caller() }}{{ a ~ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{% call w('y', 'b', 3, c=4) %}in{% endcall %}{{ [1, messages[0].role] + ['a'] }}",
    "{{ messages[0].content.startswith('Be') }}{{ messages[0].get('name', 'none') }}"
    "{{ 'a,b'.split(',') | reverse | list }}{{ (3.7 | int) + (2.5 | round) }}{{ [3, 1] | sort }}"
    "{{ [1, 2] | sum }}{{ {'a': 1, 'b': [true, none]} }}{{ 'x'.join(['a', 'b']) }}"
    "{% autoescape true %}{{ '<' ~ messages[4].content }}{% endautoescape %}"
    "{{ messages[0] | items | list }}{{ 'a\tb'.expandtabs(2) }}{{ 'a'.center(5, '*') }}",
    "{{ messages | join('-', attribute='role') }}{{ [{'x': 1}, {'x': 2}] | sum(attribute='x') }}"
    "{% for role, found in messages | groupby('role') %}{{ role }}{{ found | length }}{% endfor %}"
    "{% for role in messages | map(attribute='role') %}{{ loop.index }}/{{ loop.length }}"
    "{{ loop.last }}{{ 'a-b'.split('-', maxsplit=1) }}{{ 'aa'.replace('a', 'b', 1) }}{% endfor %}",
    "{{ messages[4].content | escape ~ '<' }}{{ (messages[4].content | e) + '<' }}{{ '<' | safe }}"
    "{% filter upper %}a{{ messages[0].role }}{% endfilter %}{{ 'a b c d' | truncate(5) }}"
    "{{ '{0} {b}'.format(1, b=2) }}{{ '{a}'.format_map({'a': 3}) }}{{ 'ff' | int(base=16) }}"
    "{% set a, b = 1, [2] %}{% with x = [a] %}{{ x + b }}{% endwith %}{{ 'z' | int(7) }}"
    "{{ ['b', 'a'] | map('upper') | join }}{{ 'abc' | list }}{{ [1, 2, 2] | unique | list }}",
]


@pytest.mark.parametrize("template", USUAL)
def test_usual_templates_write_what_jinja_writes(template):
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, **more: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, **more
    )
    expected = plain.from_string(template).render(messages=CHAT, tools=[TOOL])
    assert expected.strip()
    assert rendered(template, messages=CHAT, tools=[TOOL]).text == expected


def test_long_chats_are_written():
    """Limits grow with what is passed."""
    messages = [{"role": "user", "content": "wörd " * 200_000}, *CHAT * 50]
    template = (
        "{% set ns = namespace(all='') %}{% for m in messages %}"
        "{% set ns.all = ns.all ~ m.content ~ '\n' %}{% endfor %}{{ ns.all.split('\n') | length }}"
    )
    short = rendered(template, messages=messages[1:]).text
    assert rendered(template, messages=messages).text == str(int(short) + 1)


ANSWERS = (
    "{% for m in messages if m.content is string %}\n"
    "    {%- set said = m.role ~ ': ' %}{{ said }}\n"
    "    {%- if m.role == 'assistant' %}\n"
    "        {% generation %}\n"
    "            {%- set said = 'unknown later' %}{{ m.content }}<|end|>\n"
    "        {%- endgeneration -%}\n"
    "    {% else %}{{ m.content }}{% endif %}{{ said }}\n"
    "{% endfor %}"
)


def test_generation_blocks_are_found_and_leave_the_text_as_it_is():
    plain = ANSWERS.replace("{% generation %}", "{% if true %}")
    plain = plain.replace("{%- endgeneration -%}", "{%- endif -%}")
    plain = plain.replace("set said = 'unknown later'", "set other = ''")
    found = rendered(ANSWERS, messages=CHAT)
    assert found.text == rendered(plain, messages=CHAT).text
    answers = [found.text[begin:end] for begin, end in found.answers]
    assert answers == [f"{CHAT[at]['content']}<|end|>" for at in (2, 4)]
    assert rendered(plain, messages=CHAT).answers == []


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% macro m() %}{% generation %}a{% endgeneration %}{% endmacro %}b{{ m() }}", "ba"),
        ("b{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x }}", "ba"),
        ("b{% filter upper %}{% generation %}a{% endgeneration %}{% endfilter %}", "bA"),
        ("b{% for i in [1] recursive %}{% generation %}a{% endgeneration %}{% endfor %}", "ba"),
        ("b{% for i in [1, 2] %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}", "ba"),
    ],
)
def test_generation_blocks_whose_place_is_unknown_are_left_out(template, text):
    assert rendered(template) == (text, [])


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ("true", {"ensure_ascii": True}),
        ("ensure_ascii=true", {"ensure_ascii": True}),
        ("separators=(',', ':')", {"separators": (",", ":")}),
        ("separators=[', ', ':'], indent=2", {"separators": (", ", ":"), "indent": 2}),
        ("indent='-', sort_keys=true", {"indent": "-", "sort_keys": True}),
    ],
)
def test_options_of_tojson(options, given):
    expected = json.dumps(TOOL, **{"ensure_ascii": False, **given})
    assert rendered("{{ tool | tojson(" + options + ") }}", tool=TOOL).text == expected


def chats(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tokenizer_of_folder(folder)


def test_tools_and_documents_are_none_when_none_are_given(folder):
    tokenizer = chats(folder, "{{ tools is not none }}{{ tools is defined }}{{ documents }}")
    assert tokenizer.apply_chat_template(CHAT) == "FalseTrueNone"
    assert tokenizer.apply_chat_template(CHAT, tools=[TOOL], documents=[]) == "TrueTrue[]"


def test_values_of_none_are_left_out_of_messages(folder):
    tokenizer = chats(folder, "{{ messages[0] }}{{ bos_token }}")
    messages = [{"role": "user", "content": "a", "tool_calls": None}]
    assert tokenizer.apply_chat_template(messages) == "{'role': 'user', 'content': 'a'}"
    assert tokenizer.apply_chat_template(messages, bos_token="<b>").endswith("}<b>")


def test_the_answers_of_a_chat_are_found(folder):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = chats(folder, ANSWERS + "{{ add_generation_prompt }}").render_chat(messages)
    assert found.text.endswith("False")
    assert [found.text[begin:end] for begin, end in found.answers] == ["b<|end|>"]


DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = NEXT %}{% endfor %}"
)


def doubled(start: str, following: str, used: str = "") -> str:
    return DOUBLED.replace("START", start).replace("NEXT", following) + used


ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
SLOW = {
    "nested loops": ENDLESS,
    "macros that branch": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(50) }}",
    "comparisons": "{% set a = 'a' * 3000000 %}{% set b = 'a' * 2999999 ~ 'a' %}"
    "{% for i in range(99999) %}{{ '' if a == b }}{% endfor %}",
    "keys of one hash": "{% set x = range(0, 30000 * (2 ** 61 - 1), 2 ** 61 - 1) %}"
    "{{ dict(x | groupby('real')) | length }}",
    "names of one hash": "{% set x = range(0, 30000 * (2 ** 61 - 1), 2 ** 61 - 1) %}"
    "{% set ns = namespace(x | groupby('real')) %}",
    "filters of a loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
}
LARGE = {
    "power": "{{ 10 ** (10 ** 7) }}",
    "products": doubled("2", "ns.x * ns.x"),
    "literal": "{{ 0x" + "f" * 1000 + " }}",
    "digits": "{{ ('9' * 100000) | int }}",
    "rounding": "{{ 5 | round(-1000000000) }}",
    "repeated": "{{ 'a' * 4000000000 }}",
    "repeated from the right": "{{ 4000000000 * 'a' }}",
    "repeated list": "{% set x = [1] * 4000000000 %}",
    "added": doubled("'a'", "ns.x + ns.x"),
    "concatenated": doubled("'a'", "ns.x ~ ns.x"),
    "lists": doubled("[]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "tuples": doubled("()", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "dicts": doubled("1", "{'a': ns.x, 'b': ns.x}", "{{ ns.x == ns.x }}"),
    "dict calls": doubled("1", "dict(a=ns.x, b=ns.x)", "{{ ns.x }}"),
    "views": doubled("1", "[{1: ns.x}.items(), {1: ns.x}.items()]", "{{ ns.x }}"),
    "varargs": "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    + doubled("1", "1").replace("{% set ns.x = 1 %}", "{{ m(ns.x, ns.x) }}"),
    "deep tuple": doubled("()", "(ns.x,)", "{{ {ns.x: 1} }}"),
    "blocks": DOUBLED.replace("START", "'a'").replace(
        "{% set ns.x = NEXT %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "text of a macro": "{% macro m() %}{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endfor %}{% endmacro %}{% set x = m() %}",
    "ljust": "{{ 'a'.ljust(4000000000) }}",
    "center": "{{ 'a'.center(4000000000) }}",
    "zfill": "{{ 'a'.zfill(4000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
    "replace of nothing": "{{ ('a' * 99999).replace('', 'a' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['a'] * 99999) }}",
    "join filter": "{{ (['a'] * 99999) | join('a' * 99999) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width after a percent": "{{ '%%%1000000000d' % 1 }}",
    "width of a key": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "width that is passed": "{{ '%*d' % (1000000000, 1) }}",
    "precision": "{{ '%.1000000000f' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format within": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format again": "{{ ('{0}' * 99999).format('x' * 999999) }}",
    "format of a map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format by key again": "{{ ('%(a)s' * 99999) % {'a': 'x' * 999999} }}",
    "indent": "{{ 'a\nb' | indent(4000000000) }}",
    "tojson": "{{ [[1]] | tojson(indent=1000000000) }}",
    "tojson separators": "{{ ([1] * 99999) | tojson(separators=('a' * 99999, 'b')) }}",
    "tojson escapes": "{{ ('\U0001f600' * 999999) | tojson(ensure_ascii=true) }}",
    "answers": "{% for a in range(99999) %}{% for b in range(99999) %}{% generation %}"
    "{% continue %}{% endgeneration %}{% endfor %}{% endfor %}",
    "list of a text": "{{ ('a' * 4000000) | list | length }}",
    "sum of lists": "{{ ([[1] * 99] * 999) | sum(start=[]) | length }}",
    "search from the right": "{{ ('a' * 2000000).rfind('b' ~ 'a' * 1000000) }}",
    "strip": "{{ ('a' * 1000000 ~ 'z').strip('b' * 1000000 ~ 'a') }}",
    "trim": "{{ ('a' * 1000000 ~ 'z') | trim('b' * 1000000 ~ 'a') }}",
    "fromkeys": "{{ dict.fromkeys(range(99999), 1) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 99999}) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "batch": "{{ [1] | batch(4000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(4000000000) | list }}",
    "wide text": "{{ 'a' | center(4000000000) }}",
}
WRONG = {
    "syntax": "{% if %}",
    "a change of messages": "{{ messages.append(1) }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "division": "{{ 1 / 0 }}",
    "range": "{{ range(1000000) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "codec": "{{ 'a'.encode('unknown') }}",
    "surrogate": "\ud800",
    "surrogate of a string": "{{ '\\ud800' }}",
    "surrogate of a date": "{{ strftime_now('\ud800') }}",
    "parentheses": "{{ " + "(" * 9999 + " }}",
    "operators": "{{ " + "+".join("1" * 9999) + " }}",
    "nothing of a name": "{{ absent.role }}",
    "include": "{% include 'x' %}",
    "unknown tag": "{% answer %}{% endanswer %}",
    "generation without an end": "{% generation %}",
    "separators that are no texts": "{{ [1, 2] | tojson(separators=(1, 2)) }}",
    "one separator": "{{ [1, 2] | tojson(separators=',:,') }}",
    "keys that have no order": "{{ {1: 1, 'a': 2} | tojson(sort_keys=true) }}",
    "escaping": "{% autoescape range(9) | list %}{% endautoescape %}",
    "branches": "{% if a %}"
    + "".join(f"{{% elif b %}}{{% set c{i:x} = 1 %}}" for i in range(3500))
    + "{% endif %}",
    "too long": "a" * (MOST_TEMPLATE + 1),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_runs_for_ever_is_stopped(monkeypatch, name):
    monkeypatch.setattr(template_budget, "SECONDS", 0.2)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"a\.jinja: .* it takes longer than 0\.2 s"):
        rendered(SLOW[name], "a.jinja", messages=CHAT)
    assert time.process_time() - began < 5


def test_a_template_is_stopped_in_any_thread(monkeypatch):
    monkeypatch.setattr(template_budget, "SECONDS", 0.2)
    caught = []

    def run():
        try:
            rendered(ENDLESS)
        except ValueError as failure:
            caught.append(str(failure))

    threads = [Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert rendered("{{ 1 + 1 }}").text == "2"
    for thread in threads:
        thread.join()
    assert len(caught) == 2


def test_a_template_that_runs_for_ever_names_no_end_of_text(monkeypatch, folder):
    monkeypatch.setattr(template_budget, "SECONDS", 0.2)
    tokenizer = chats(folder, ENDLESS)
    began = time.process_time()
    for _ in range(100):  # it is tried once
        assert tokenizer.end_ids == ()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("template", [*LARGE.values(), *WRONG.values()], ids=[*LARGE, *WRONG])
def test_a_template_that_grows_or_fails_is_a_value_error_with_its_file(template):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^a\.jinja: the chat template failed: "):
        rendered(template, "a.jinja", messages=CHAT)
    assert time.process_time() - began < 5


def test_want_of_memory_is_a_value_error():
    def fail():
        raise MemoryError

    with pytest.raises(ValueError, match="the chat template failed: MemoryError"):
        rendered("{{ fail() }}", fail=fail)


@pytest.fixture
def folder(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>"))
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_failure_names_the_file_of_the_template(folder):
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config.write_text(json.dumps({"chat_template": "{{ 1 / 0 }}"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: the chat template"):
        tokenizer_of_folder(folder).apply_chat_template(CHAT)
    template.write_text("{{ 1 / 0 }}")
    tokenizer = tokenizer_of_folder(folder)
    with pytest.raises(ValueError, match=r"chat_template\.jinja: the chat template"):
        tokenizer.apply_chat_template(CHAT)
    tokenizer.chat_template = "{{ 2 / 0 }}"
    with pytest.raises(ValueError, match=r"^the chat template"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize("content", [b"\xff\xfe{{", b"a" * (4 * MOST_TEMPLATE + 1)])
def test_a_template_that_is_no_text_is_damaged(folder, content):
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=r"chat_template\.jinja: (no UTF-8|it has)"):
        tokenizer_of_folder(folder)


def test_a_template_of_another_type_in_gguf_is_refused():
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [], "tokenizer.chat_template": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"m\.gguf: tokenizer\.chat_template is 5"):
        tokenizer_of_gguf(metadata, "m.gguf")


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "BPE", "Unigram"])
def test_a_tokenizer_without_its_unknown_token_names_the_file(folder, kind):
    if kind == "Unigram":
        model = tokenizers.models.Unigram([("a", 0.0)])
    elif kind == "BPE":
        model = tokenizers.models.BPE({"a": 0}, [], unk_token="<unk>")
    else:
        model = getattr(tokenizers.models, kind)({"a": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_of_folder(folder)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer fails on the text 'b'"):
        tokenizer.encode("b")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer fails on the ids"):
        tokenizer.decode([1 << 40])


def test_a_panic_of_the_tokenizer_is_a_value_error(folder, capfd):
    path = folder / "tokenizer.json"
    given = json.loads(path.read_text())
    given["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    path.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer fails on"):
        tokenizer_of_folder(folder).encode("a" * 40 + "b")
