"""Samples of a file: which tokens they have, which of them are learnt, and the forms of files.

The ids and masks of chats are those of transformers 5.24 (`apply_chat_template` with
`return_assistant_tokens_mask`), whose templates mark the answers; a deep test computes them again.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import examples

from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.training.batches import IGNORED
from cupyattn.models.training.data import Reader

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<think>"]
MERGES = [("▁", "A"), ("▁", "4"), ("h", "i"), ("▁", "hi"), ("y", "o"), ("▁", "yo"), ("o", "k")]


def sentencepiece(*, metaspace: bool = False, adds: tuple[str, ...] = ("<s>", "$A")) -> Tokenizer:
    """The tokenizer of Llama 2 in small: a space is put before each text, bytes are tokens."""
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *"▁A:4hiyoku?sINT[]/."]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *map("".join, MERGES)]))}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    normal = tokenizers.normalizers
    if metaspace:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        inner.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    return finished(inner, adds)


def byte_level(*, trim: bool = False) -> Tokenizer:
    """A tokenizer as Qwen's, or as GPT-2's, whose offsets leave out spaces."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "A"), ("Ġ", "4"), ("h", "i"), ("y", "o"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    pieces = dict.fromkeys([*SPECIAL, *letters, *map("".join, merges)])
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return finished(inner, ())


def finished(inner, adds) -> Tokenizer:
    inner.add_special_tokens(SPECIAL)
    if adds:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=list(adds), special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return Tokenizer(inner, None, {"bos_token": "<s>", "eos_token": "</s>"})


def reader(tokenizer: Tokenizer, template: str | None = None, **options) -> Reader:
    tokenizer.chat_template = template
    return Reader(tokenizer, 2, 400, **options)


def pieces_of(tokenizer, ids) -> list[str]:
    return [tokenizer.inner.id_to_token(int(each)) for each in ids]


def parts(made: Reader, line: dict) -> tuple[list[str], list[str]]:
    """The tokens of a line's sample, and those that are learnt."""
    (sample,) = made.samples(line, "here")
    learnt = sample.labels[sample.labels != IGNORED]
    return pieces_of(made.tokenizer, sample.ids), pieces_of(made.tokenizer, learnt)


LINE = {"prompt": "A:", "completion": " 4"}


@pytest.mark.parametrize("metaspace", [False, True])
def test_an_answer_gains_no_space(metaspace):
    """Encoded alone it would be ▁▁4."""
    tokens, learnt = parts(reader(sentencepiece(metaspace=metaspace)), LINE)
    assert tokens == ["<s>", "▁A", ":", "▁4", "</s>"]
    assert learnt == ["▁4", "</s>"]


@pytest.mark.parametrize(
    ("prompt", "completion", "learnt"),
    [
        ("A: ", "4", ["▁4", "</s>"]),  # a token of both is learnt: else the 4 never would be
        ("A:h", "i", ["hi", "</s>"]),
        ("A:", "é", ["<0xC3>", "<0xA9>", "</s>"]),
        ("é", ":", [":", "</s>"]),
        ("A: ", " 4", ["▁4", "</s>"]),
    ],
)
def test_tokens_across_the_boundary_are_learnt(prompt, completion, learnt):
    made = reader(sentencepiece())
    tokens, found = parts(made, {"prompt": prompt, "completion": completion})
    assert tokens == ["<s>", *pieces_of(made.tokenizer, encoded(made, prompt + completion)), "</s>"]
    assert found == learnt


def encoded(made, text):
    return made.tokenizer.encode(text, special_tokens=False)


@pytest.mark.parametrize("trim", [False, True])
def test_spaces_that_offsets_leave_out_are_of_the_answer(trim):
    made = reader(byte_level(trim=trim))
    assert parts(made, LINE)[1] == ["Ġ4", "</s>"]
    assert parts(made, {"prompt": "A:", "completion": "  "})[1] == ["ĠĠ", "</s>"]
    assert parts(made, {"prompt": "A:  ", "completion": "4"})[1] == ["Ġ4", "</s>"]
    assert parts(made, {"prompt": "A:\n", "completion": "\n"})[1] == ["ĊĊ", "</s>"]


TEXTS = st.text("Ahi4 é\n", min_size=1, max_size=9)


@examples(40, deep=2000)
@given(TEXTS, TEXTS, st.booleans())
def test_each_token_is_of_the_prompt_or_learnt(prompt, completion, trim):
    made = reader(byte_level(trim=trim))
    (sample,) = made.samples({"prompt": prompt, "completion": completion}, "here")
    ids = encoded(made, prompt + completion)
    assert sample.ids.tolist() == [*ids, 2]
    learnt = [each for each in sample.labels[:-1] if each != IGNORED]
    read = ids[: len(ids) + 1 - len(learnt)]
    assert learnt == [*ids, 2][len(read) :]
    written = made.tokenizer.decode(learnt)
    assert written.endswith(completion) or len(read) == 1
    assert prompt.startswith(made.tokenizer.decode(read)) or len(read) == 1


@pytest.mark.parametrize("line", [LINE, {"text": "A: 4"}])
def test_a_tokenizer_that_adds_end_tokens_adds_one(line):
    made = reader(sentencepiece(adds=("<s>", "$A", "</s>")))
    assert parts(made, line)[0] == ["<s>", "▁A", ":", "▁4", "</s>"]


def test_tokens_that_a_text_has_are_not_doubled():
    made = reader(sentencepiece())
    assert parts(made, {"text": "<s>A</s>"})[0] == ["<s>", "▁A", "</s>"]
    assert parts(made, {"text": "A</s>A"})[0] == ["<s>", "▁A", "</s>", "▁A", "</s>"]
    none = reader(sentencepiece(adds=()))
    assert parts(none, {"text": "A:"})[0] == ["▁A", ":", "</s>"]


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "A?"},
    {"role": "assistant", "content": " 4 é"},
]
SYSTEM = {"role": "system", "content": "ok"}
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + message['content'] + '</s>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'user' %}{{ message['content'] + '</s>\n' }}{% else %}"
    "{% generation %}{{ message['content'] + '</s>\n' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'user' %}{{ message['content'] + '<|end|>\n' }}{% else %}"
    "{% generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
R1 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] }}{% else %}{{ '<|assistant|>' }}"
    "{% generation %}{{ message['content'].split('</think>')[-1] + '</s>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.index0 >= messages|length - 2 else '') "
    "+ message['content'] + '[/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + message['content'] + '</s>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"Llama 2": LLAMA_2, "Zephyr": ZEPHYR, "Phi-3": PHI_3, "R1": R1, "Mistral": MISTRAL}
KINDS = {"sentencepiece": sentencepiece, "byte-level": byte_level}
CASES = [(template, kind) for template in TEMPLATES for kind in KINDS]


def plain(template: str) -> str:
    """The template as models have it, without marks."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def messages_of(template: str) -> list[dict[str, str]]:
    return [SYSTEM, *CHAT] if template == "Mistral" else CHAT


def by_transformers(template: str, kind: str) -> tuple[list[int], str]:
    """The ids of a chat, and 1 for each that is of an answer."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind]().inner, bos_token="<s>", eos_token="</s>"
    )
    found = fast.apply_chat_template(
        messages_of(template), chat_template=TEMPLATES[template], tokenize=True,
        return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    return found["input_ids"], "".join(map(str, found["assistant_masks"]))


EXPECTED = {
    ("Llama 2", "sentencepiece"): (
        [1, 263, 278, 275, 276, 90, 277, 279, 285, 263, 278, 280, 275, 276, 90, 277, 279, 287, 2,
         1, 263, 278, 275, 276, 90, 277, 279, 282, 273, 263, 278, 280, 275, 276, 90, 277, 279,
         263, 283, 263, 202, 176, 2],
        "0000000000000000011000000000000000000111111",
    ),
    ("Llama 2", "byte-level"): (
        [1, 65, 47, 52, 57, 58, 67, 227, 265, 227, 65, 21, 47, 52, 57, 58, 67, 227, 266, 2, 1,
         65, 47, 52, 57, 58, 67, 263, 37, 227, 65, 21, 47, 52, 57, 58, 67, 227, 264, 227, 134,
         109, 2],
        "0000000000000000011100000000000000000111111",
    ),
    ("Zephyr", "sentencepiece"): (
        [3, 263, 17, 284, 2, 263, 17, 4, 263, 17, 286, 2, 263, 17, 3, 263, 17, 264, 273, 2, 263,
         17, 4, 263, 17, 283, 263, 202, 176, 2, 263, 17],
        "00000000001111000000000001111111",
    ),
    ("Zephyr", "byte-level"): (
        [3, 205, 265, 2, 205, 4, 205, 266, 2, 205, 3, 205, 39, 37, 2, 205, 4, 205, 264, 227, 134,
         109, 2, 205],
        "000000011100000000111111",
    ),
    ("Phi-3", "sentencepiece"): (
        [3, 263, 17, 284, 5, 263, 17, 4, 263, 17, 286, 5, 263, 17, 3, 263, 17, 264, 273, 5, 263,
         17, 4, 263, 17, 283, 263, 202, 176, 5, 263, 17, 2],
        "000000000011110000000000011111110",
    ),
    ("Phi-3", "byte-level"): (
        [3, 205, 265, 5, 205, 4, 205, 266, 5, 205, 3, 205, 39, 37, 5, 205, 4, 205, 264, 227, 134,
         109, 5, 205, 2],
        "0000000111000000001111110",
    ),
    ("R1", "sentencepiece"): (
        [3, 285, 4, 287, 2, 3, 282, 273, 4, 263, 283, 263, 202, 176, 2],
        "000110000111111",
    ),
    ("R1", "byte-level"): (
        [3, 265, 4, 266, 2, 3, 39, 37, 4, 264, 227, 134, 109, 2],
        "00011000011111",
    ),
    ("Mistral", "sentencepiece"): (
        [1, 263, 278, 275, 276, 90, 277, 279, 285, 278, 280, 275, 276, 90, 277, 279, 287, 2, 263,
         278, 275, 276, 90, 277, 279, 263, 288, 17, 17, 264, 273, 278, 280, 275, 276, 90, 277,
         279, 263, 283, 263, 202, 176, 2],
        "00000000000000001100000000000000000000111111",
    ),
    ("Mistral", "byte-level"): (
        [1, 65, 47, 52, 57, 58, 67, 227, 265, 65, 21, 47, 52, 57, 58, 67, 227, 266, 2, 65, 47,
         52, 57, 58, 67, 227, 85, 81, 205, 205, 39, 37, 65, 21, 47, 52, 57, 58, 67, 227, 264,
         227, 134, 109, 2],
        "000000000000000011100000000000000000000111111",
    ),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("template", "kind"), CASES)
def test_the_expected_tokens_are_those_of_transformers(template, kind):
    assert by_transformers(template, kind) == EXPECTED[template, kind]


def chat_of(template: str, kind: str, *, marked: bool) -> tuple[list[int], str]:
    made = reader(KINDS[kind](), TEMPLATES[template] if marked else plain(TEMPLATES[template]))
    (sample,) = made.samples({"messages": messages_of(template)}, "here")
    mask = [0, *(sample.labels[:-1] != IGNORED)]
    return sample.ids.tolist(), "".join(str(int(each)) for each in mask)


@pytest.mark.parametrize(("template", "kind"), CASES)
def test_templates_that_mark_answers_are_believed(template, kind):
    assert chat_of(template, kind, marked=True) == EXPECTED[template, kind]


@pytest.mark.filterwarnings("ignore:here. the chat template writes answers in another way")
@pytest.mark.parametrize(("template", "kind"), CASES)
def test_answers_are_found_in_templates_without_marks(template, kind):
    """The template of Phi-3 ends all chats with a token, which is learnt with the last answer.

    Mistral's moves the system's message: the first answer was written after another text.
    """
    ids, mask = EXPECTED[template, kind]
    if template == "Phi-3":
        mask = mask[:-1] + "1"
    if template == "Mistral":
        first = mask.index("1")
        mask = mask[:first] + mask[first:].replace("1", "0", mask[first:].index("0"))
    assert chat_of(template, kind, marked=False) == (ids, mask)


def written(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_chats_whose_last_answer_alone_is_learnt_are_counted(tmp_path):
    made = reader(sentencepiece(), plain(MISTRAL))
    line = {"messages": [SYSTEM, *CHAT]}
    data = made.read_data(written(tmp_path, line, {"messages": CHAT}, line))
    ((note, count),) = data.notes.items()
    assert count == 2 and "only the last answer is learnt" in note
    with pytest.warns(UserWarning, match=r"data.jsonl: of 2 samples: the chat template writes ans"):
        assert len(made.read(tmp_path / "data.jsonl")) == 3


def test_reasoning_that_the_template_leaves_out_is_noted(tmp_path):
    made = reader(sentencepiece(), plain(R1))
    thought = [CHAT[0], {"role": "assistant", "content": "<think>A</think>yo"}]
    data = made.read_data(written(tmp_path, {"messages": thought}, {"messages": CHAT}))
    ((note, count),) = data.notes.items()
    assert count == 1 and "leaves out a part of an answer" in note
    assert pieces_of(made.tokenizer, data.samples[0].ids)[-2:] == ["▁yo", "</s>"]
    made.tokenizer.chat_template = plain(R1).replace(
        ".split('</think>')[-1]", ".replace('>', '>\\n')"
    )
    assert not made.read_data(tmp_path / "data.jsonl").notes  # it is only broken into lines


MISTRAL_V03 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') "
    "+ message['content'] + '[/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
)


@pytest.mark.filterwarnings("ignore:here. the chat template writes a prompt in another way")
@pytest.mark.parametrize("answer", [" 4 é", "[INST] A?[/INST] 4", "A?"])
def test_an_answer_is_learnt_after_the_prompt_of_generation(answer, tmp_path):
    """The system message is in the text of a question that comes last, and in no other."""
    made = reader(byte_level(), MISTRAL_V03)
    chat = [SYSTEM, *CHAT[:3], {"role": "assistant", "content": answer}]
    assert [len(made.samples({"messages": part}, "here")) for part in (chat[:3], chat)] == [1, 1]
    prompt = made.tokenizer.apply_chat_template(chat[:-1])
    assert "[INST] ok\n\nA?[/INST]" in prompt
    tokens, learnt = parts(made, {"messages": chat})
    following = pieces_of(made.tokenizer, encoded(made, f" {answer}</s>"))
    assert learnt == following
    assert tokens == [*pieces_of(made.tokenizer, encoded(made, prompt)), *following]
    data = made.read_data(written(tmp_path, {"messages": chat}, {"messages": CHAT}))
    ((note, count),) = data.notes.items()
    assert count == 1 and "only the last answer is learnt, after its prompt" in note


def test_tools_are_passed_to_the_template():
    template = "{{ tools | tojson if tools is not none else '' }}" + plain(ZEPHYR)
    made, tools = reader(byte_level(), template), [{"name": "f"}]
    line = {"messages": CHAT}
    expected = parts(reader(byte_level(), '[{"name": "f"}]' + plain(ZEPHYR)), line)
    for passed in (tools, json.dumps(tools)):
        assert parts(made, {**line, "tools": passed}) == expected
    for none in (None, [], "[]", ""):
        assert parts(made, {**line, "tools": none}) == parts(made, line)
    for wrong in ("f", ["f"], {"name": "f"}, "3"):
        with pytest.raises(ValueError, match=r"its tools.* write a list of objects, or remove"):
            made.samples({**line, "tools": wrong}, "here")


def test_a_prompt_beside_messages_is_their_first_and_passed_over():
    """UltraChat's files have both."""
    made = reader(byte_level(), plain(ZEPHYR))
    assert parts(made, {"prompt": "hi", "messages": CHAT}) == parts(made, {"messages": CHAT})


def test_a_template_that_rewrites_the_last_prompt_is_refused():
    made = reader(sentencepiece(), "{{ messages|length }}{{ messages[-1]['content'] }}")
    with pytest.raises(ValueError, match="here: the chat template writes what is before message 3"):
        made.samples({"messages": CHAT}, "here")


ALPACA = {"instruction": "hi", "input": "A?", "output": "yo", "text": "hi A? yo"}
SHAREGPT = {
    "system": "ok",
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
}


def test_alpaca_and_sharegpt_are_chats_of_the_template():
    made = reader(sentencepiece(), plain(ZEPHYR).replace("'user'", "'user' or true"))
    asked = {"role": "user", "content": "hi\n\nA?"}
    answer, answered = {"role": "assistant", "content": "yo"}, {"from": "model", "value": "yo"}
    pairs = [
        (ALPACA, [asked, answer]),
        ({**ALPACA, "system": "ok", "history": [["A", "4"]]}, [
            SYSTEM, {"role": "user", "content": "A"}, {"role": "assistant", "content": "4"},
            asked, answer,
        ]),
        ({**ALPACA, "input": ""}, [{**asked, "content": "hi"}, answer]),
        (SHAREGPT, [SYSTEM, {**asked, "content": "hi"}, answer]),
        ({"messages": SHAREGPT["conversations"]}, [{**asked, "content": "hi"}, answer]),
        ({"conversations": [{"from": "observation", "value": "A"}, answered]},
         [{"role": "tool", "content": "A"}, answer]),
        ({"conversations": CHAT}, CHAT),
    ]  # fmt: skip
    for line, messages in pairs:
        assert parts(made, line) == parts(made, {"messages": messages})


WEIGHED = [dict(each) for each in CHAT]
WEIGHED[1]["weight"] = 0


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_weight_0_is_not_learnt(kind, marked):
    made = reader(KINDS[kind](), ZEPHYR if marked else plain(ZEPHYR))
    (both,) = made.samples({"messages": CHAT}, "here")
    (last,) = made.samples({"messages": WEIGHED}, "here")
    assert last.ids.tolist() == both.ids.tolist()
    found, every = (
        "".join(str(int(label != IGNORED)) for label in each.labels) for each in (last, both)
    )
    first, second = re.findall("1+", every)
    assert found == every.replace(first, "0" * len(first), 1)
    assert len(re.findall("1+", found)) == 1 and len(second) > 1
    named = {"user": "human", "assistant": "gpt"}
    shared = [{"from": named[m["role"]], "value": m["content"],
               "weight": m.get("weight", 1)} for m in WEIGHED]  # fmt: skip
    (same,) = made.samples({"conversations": shared}, "here")
    assert same.labels.tolist() == last.labels.tolist()


def test_messages_after_the_last_answer_that_is_learnt_are_left_out():
    made = reader(sentencepiece(), plain(ZEPHYR))
    until = [*CHAT[:3], {**CHAT[3], "weight": 0.0}]
    assert parts(made, {"messages": until}) == parts(made, {"messages": CHAT[:2]})


def test_marks_that_cannot_be_assigned_to_answers_are_refused():
    twice = ZEPHYR.replace(
        "{% generation %}", "{% generation %}A{% endgeneration %}{% generation %}"
    )
    made = reader(sentencepiece(), twice)
    assert len(made.samples({"messages": CHAT}, "here")) == 1
    with pytest.raises(
        ValueError, match="marks 4 parts of 2 answers, of which one has the weight 0"
    ):
        made.samples({"messages": WEIGHED}, "here")


def test_notes_of_one_object_are_warnings():
    made = reader(sentencepiece(), plain(MISTRAL))
    with pytest.warns(UserWarning, match="^here: the chat template writes answers in another way"):
        made.samples({"messages": [SYSTEM, *CHAT]}, "here")


@pytest.mark.parametrize("more", ["", "A?"])
def test_alpaca_has_its_own_prompt_without_a_template(more):
    made = reader(byte_level())
    (sample,) = made.samples({**ALPACA, "input": more}, "here")
    text = made.tokenizer.decode(sample.ids, special_tokens=True)
    assert text.startswith("Below is an instruction that describes a task")
    assert ("### Input:\nA?\n\n" in text) == bool(more)
    assert text.endswith("### Instruction:\nhi\n\n" * (not more) + "### Response:\nyo</s>")
    assert parts(made, ALPACA)[1] == ["yo", "</s>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**ALPACA, "output": ""}, "its output is ''"),
        ({**ALPACA, "history": ["A"]}, r"its history is \['A'\]; .*write pairs of two texts"),
        ({"instruction": "hi", "input": "A"}, "it has 'instruction'; "),
        ({"conversations": [{"from": "gpt"}]}, "its message 0 has the content None"),
        ({"conversations": [{"from": None, "value": "A"}]}, "its message 0 has the role None"),
        (
            {"conversations": [{"from": "GPT", "value": "A"}]},
            "its message 0 is from 'GPT'; .*write one of system, user, .*human, gpt",
        ),
        ({"conversations": "A"}, "its conversations are 'A'"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "its message 1 has the weight 0.5"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": None}]}, "its message 1 has the weight None"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "all answers have the weight 0"),
        ({**SHAREGPT, "system": 7}, "its system is 7"),
        ({**SHAREGPT, **ALPACA}, "use the names of one of these forms alone"),
    ],
)
def test_lines_of_other_forms_are_refused(line, message):
    with pytest.raises(ValueError, match=f"here: .*{message}"):
        reader(sentencepiece(), plain(ZEPHYR)).samples(line, "here")


@pytest.mark.parametrize("name", ["system", "history"])
def test_a_system_message_needs_a_template(name):
    with pytest.raises(ValueError, match=f"its {name} is .*, and the model has no chat template"):
        reader(sentencepiece()).samples({**ALPACA, name: ["A"]}, "here")


@pytest.mark.parametrize("before", ["", "\ufeff", " \n"])
def test_a_file_may_be_one_array(before, tmp_path):
    lines = [LINE, {"text": "A"}, ALPACA]
    made = reader(sentencepiece())
    data = made.read_data(written(tmp_path, *lines))
    assert data.forms == {"prompts and completions": 1, "texts": 1, "Alpaca": 1}
    path = tmp_path / "data.json"
    path.write_text(before + json.dumps(lines, indent=1), "utf-8")
    array = made.read_data(path)
    assert array.forms == data.forms
    for one, other in zip(array.samples, data.samples, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()
    path.write_text(json.dumps([LINE, 3]))
    with pytest.raises(ValueError, match=r"item 2 of .*data.json: it is 3; .*one array of objects"):
        made.read(path)
    path.write_text("[" + json.dumps(LINE))
    with pytest.raises(ValueError, match=r"data.json: no JSON \(Expecting"):
        made.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no samples; each line"):
        made.read(path)


def test_a_moment_is_the_date_of_templates():
    """Templates of Llama 3 print the date, if they can."""
    template = "{{ strftime_now('%d %b %Y') }}:" + plain(LLAMA_2)
    days = [datetime(2026, 11, 28), datetime(2026, 11, 29)]
    first, second = (
        reader(byte_level(), template, moment=day).samples({"messages": CHAT}, "here")[0].ids
        for day in days
    )
    text = reader(byte_level()).tokenizer.decode(first)
    assert text.startswith("28 Nov 2026:") and first.tolist() != second.tolist()
    long = reader(byte_level(), template.replace("%d", "%d" * 999), moment=days[0])
    with pytest.raises(ValueError, match="by more than 1000 characters"):
        long.samples({"messages": CHAT}, "here")
