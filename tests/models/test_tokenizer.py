"""Text to ids and back, from each kind of file that has a tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")

from support.archives import unpacked  # noqa: E402
from tokenizers import processors  # noqa: E402

from cupyattn import models  # noqa: E402
from cupyattn.models.tokenizer import (  # noqa: E402
    tokenizer_of_folder,
    tokenizer_of_gguf,
    write_tokenizer,
)
from cupyattn.models.tokenizer.byte_level import KINDS, byte_level  # noqa: E402

FOLDER = unpacked(Path(__file__).parent / "checkpoints.zip")
TEXTS = [
    "", " ", "Hello, world!", "  two  spaces ", "tabs\tand\n\nlines\r\n", "it's we'll I'D",
    "naïve café", "日本語のテキスト", "🙂👍🏽", "x=3.14159; foo_bar(1, 2)", "12345 ½ ٣",
    "\u00a0a\u200bb",
]  # fmt: skip
END = "<|endoftext|>"


def byte_alphabet() -> dict[int, str]:
    """How GPT-2 writes bytes: those that print as they are, the others from U+0100 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ"]
VOCAB = {
    token: number
    for number, token in enumerate(
        [*byte_alphabet().values(), *(merge.replace(" ", "") for merge in MERGES), END, "<user>"]
    )
}


def tokens(tokenizer, text: str) -> list[str]:
    return tokenizer.inner.encode(text, add_special_tokens=False).tokens


def gguf_metadata(**changes) -> dict:
    found = {
        "model": "gpt2", "pre": "smollm", "tokens": list(VOCAB), "merges": MERGES,
        "token_type": [{END: 3, "<user>": 4}.get(token, 1) for token in VOCAB],
        "bos_token_id": VOCAB[END], "eos_token_id": VOCAB[END],
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**found, **changes}.items()}


def from_gguf(**changes):
    return tokenizer_of_gguf(gguf_metadata(**changes), "m.gguf")


@pytest.fixture
def gpt2_folder(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB), encoding="utf-8")
    lines = "\n".join(["#version: 0.2", *MERGES, ""])
    (tmp_path / "merges.txt").write_text(lines, encoding="utf-8")
    return tmp_path


def test_vocab_and_merges_of_gpt2(gpt2_folder):
    tokenizer = tokenizer_of_folder(gpt2_folder)
    assert tokens(tokenizer, "hello wor123") == ["hello", "Ġwor", "123"]
    assert tokenizer.encode(f"hello{END}") == [VOCAB["hello"], VOCAB[END]]
    assert tokenizer.decode([VOCAB["hello"], VOCAB[END]]) == "hello"
    assert tokenizer.decode([VOCAB["hello"], VOCAB[END]], special_tokens=True) == f"hello{END}"
    assert tokenizer.vocab_size == len(VOCAB)
    assert tokenizer.id_of("hello") == VOCAB["hello"] and tokenizer.id_of("nothing") is None
    assert "without a chat template" in repr(tokenizer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", {words: pre for pre, words in KINDS.items()}.values())
def test_any_text_comes_back(pre, text):
    tokenizer = from_gguf(pre=pre)
    assert tokenizer.decode(tokenizer.encode(text, special_tokens=False)) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "123  12", ["123", "Ġ", "Ġ", "12"]),
        ("smollm", "123  12", ["1", "2", "3", "ĠĠ", "1", "2"]),
        ("llama-bpe", "1234\n\n", ["123", "4", "Ċ", "Ċ"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("deepseek-r1-qwen", "123", ["1", "2", "3"]),
        ("llama3", "1234", ["123", "4"]),
        ("falcon3", "1234", ["123", "4"]),
        ("dbrx", "1234", ["123", "4"]),
        ("gpt-2", "hello wor", ["hello", "Ġwor"]),
        ("smollm", f"hello{END}<user> wor", ["hello", END, "<user>", "Ġwor"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_words_are_cut_as_each_kind_does(pre, text, expected):
    assert tokens(from_gguf(pre=pre), text) == expected


WORDS = {
    "default": ["it", "'", "s", " we", "'", "LL", " ", "123", "4", "  ", " x", "=$", "1", "/",
                "HelloWorld", "\n\n", " ", "½", " é", ".", "\n"],
    "gpt-2": ["it", "'s", " we", "'", "LL", " 1234", "  ", " x", "=$", "1", "/", "HelloWorld",
              "\n\n", " ½", " é", ".", "\n"],
    "smollm": ["it", "'s", " we", "'", "LL", " ", "1", "2", "3", "4", "  ", " x", "=$", "1", "/",
               "HelloWorld", "\n\n ", "½", " é", ".", "\n"],
    "llama3": ["it", "'s", " we", "'LL", " ", "123", "4", "  ", " x", "=$", "1", "/HelloWorld",
               "\n\n", " ", "½", " é", ".\n"],
    "qwen2": ["it", "'s", " we", "'LL", " ", "1", "2", "3", "4", "  ", " x", "=$", "1",
              "/HelloWorld", "\n\n", " ", "½", " é", ".\n"],
    "tekken": ["it", "'s", " we", "'LL", " ", "1", "2", "3", "4", "  ", " x", "=$", "1", "/Hello",
               "World", "\n\n", " ", "½", " é", ".\n"],
    "gpt-4o": ["it's", " we'LL", " ", "123", "4", "  ", " x", "=$", "1", "/Hello", "World",
               "\n\n", " ", "½", " é", ".\n"],
}  # fmt: skip


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_each_kind(pre):
    """In the order of llama.cpp's patterns: what tokenizer.json of such a model cuts, too."""
    text = "it's we'LL 1234   x=$1/HelloWorld\n\n ½ é.\n"
    alphabet = {character: byte for byte, character in byte_alphabet().items()}
    cut = from_gguf(pre=pre).inner.pre_tokenizer.pre_tokenize_str(text)
    assert [bytes(map(alphabet.get, word)).decode() for word, _ in cut] == WORDS[pre]


def test_a_file_that_names_no_kind_is_read_as_default_and_warns():
    metadata = gguf_metadata()
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(UserWarning, match=r"m\.gguf does not name the way .* convert the model"):
        found = tokenizer_of_gguf(metadata, "m.gguf")
    assert tokens(found, "1234") == tokens(from_gguf(pre="default"), "1234") == ["123", "4"]


def test_llama3_takes_a_word_that_is_a_token():
    """Whatever the merges make of it: here none would."""
    vocab = {**VOCAB, "whole": len(VOCAB)}
    with_it, without = (byte_level(vocab, MERGES, KINDS[kind]) for kind in ("llama3", "dbrx"))
    assert with_it.encode("whole").tokens == ["whole"]
    assert without.encode("whole").tokens == ["w", "h", "o", "l", "e"]


def test_texts_begin_and_end_as_the_metadata_say():
    end = VOCAB[END]
    assert end not in from_gguf().encode("hello")
    assert from_gguf(add_bos_token=True).encode("hello") == [end, VOCAB["hello"]]
    for pre in ("llama-bpe", "llama3", "falcon3", "tekken"):
        assert from_gguf(pre=pre).encode("hello") == [end, VOCAB["hello"]]
    both = from_gguf(add_bos_token=True, add_eos_token=True)
    assert both.encode("hello", special_tokens=False) == [VOCAB["hello"]]
    # No token of the end: a model continues the text.
    assert both.encode("hello") == [end, VOCAB["hello"]] and both.encode("") == [end]
    assert both.inner.encode("hello").ids == [end, VOCAB["hello"], end]


POSTS = {
    "nothing": None,
    "begins": processors.TemplateProcessing("<b> $A", special_tokens=[("<b>", 1)]),
    "ends": processors.TemplateProcessing("$A <e>", special_tokens=[("<e>", 2)]),
    "begins and ends": processors.TemplateProcessing(
        "<b> $A <e>", special_tokens=[("<b>", 1), ("<e>", 2)]
    ),
    "begins after bytes": processors.Sequence([
        processors.ByteLevel(),
        processors.TemplateProcessing("<b> <e> $A", special_tokens=[("<b>", 1), ("<e>", 2)]),
    ]),
    "as Roberta": processors.RobertaProcessing(("<e>", 2), ("<b>", 1)),
    "as Bert": processors.BertProcessing(("<e>", 2), ("<b>", 1)),
    "of bytes": processors.ByteLevel(),
}  # fmt: skip
BEGINS = {"nothing": [], "ends": [], "of bytes": [], "begins after bytes": [1, 2]}


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize("post", POSTS)
def test_texts_begin_as_tokenizer_json_says_unless_add_bos_token_says(tmp_path, post, add):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<b>": 1, "<e>": 2}, []))
    inner.add_special_tokens(["<b>", "<e>"])
    if POSTS[post] is not None:
        inner.post_processor = POSTS[post]
    inner.save(str(tmp_path / "tokenizer.json"))
    given = {"bos_token": "<b>", "add_bos_token": add, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    begins = BEGINS.get(post, [1])
    if add is not None:
        begins = [1] * add + [token for token in begins if token != 1]
    tokenizer = tokenizer_of_folder(tmp_path)
    for text, ids in (("aa", [0, 0]), ("", []), ("a<e>", [0, 2])):
        assert tokenizer.encode(text) == [*begins, *ids]
        assert tokenizer.encode(text, special_tokens=False) == ids
        if add is None and "ends" not in post and "as" not in post:
            assert inner.encode(text).ids == [*begins, *ids]
    write_tokenizer(tokenizer, tmp_path)
    assert tokenizer_of_folder(tmp_path).begin_ids == tuple(begins)


def test_add_bos_token_without_a_bos_token_adds_none(tmp_path, gpt2_folder):
    given = {"tokenizer_class": "GPT2Tokenizer", "bos_token": None, "add_bos_token": True}
    (gpt2_folder / "tokenizer_config.json").write_text(json.dumps(given))
    assert tokenizer_of_folder(gpt2_folder).encode("hello") == [VOCAB["hello"]]


AFTER = {
    "{{ m.content }}<user>": "<user>",
    "{{ m.content }} <user>\n": "<user>",
    "{{ m.content }}\n\n": None,
    "{{ m.content }}.<user>": None,
    "{{ m.content[:3] }}<user>": None,
    "{{ raise_exception('no') }}": None,
    "{{ m.content": None,
}


@pytest.mark.parametrize("template", AFTER)
def test_texts_end_with_the_token_that_the_template_writes_after_an_answer(template):
    pytest.importorskip("jinja2")
    whole = "{% for m in messages %}[]" + template + "{% endfor %}"
    tokenizer = from_gguf()
    assert tokenizer.end_ids == (VOCAB[END],)
    tokenizer.chat_template = whole
    last = () if AFTER[template] is None else (VOCAB[AFTER[template]],)
    assert tokenizer.end_ids == (VOCAB[END], *last)
    tokenizer.chat_template = "{{ messages[1].content }}" + END
    assert tokenizer.end_ids == (VOCAB[END],)


def test_ends_of_text_without_jinja_are_those_with_a_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert from_gguf(eos_token_id=0).end_ids == (0,)
    metadata = {**gguf_metadata(), "tokenizer.chat_template": "{{ messages[1].content }}<user>"}
    assert tokenizer_of_gguf(metadata, "m.gguf").end_ids == (VOCAB[END],)


SCORED = {
    "<unk>": 0, "<s>": 0, "</s>": 0, "<0x0A>": 0, "<0xC3>": 0, "<0xA9>": 0, "\u2581": -1, "a": -2,
    "b": -3, "c": -4, "ab": -6, "bc": -5, "\u2581a": -7, "abc": -8, "\u2581abc": -9,
}  # fmt: skip


def sentencepiece(**changes):
    types = [2, 3, 3, 6, 6, 6] + [1] * (len(SCORED) - 6)
    found = {
        "model": "llama", "tokens": list(SCORED), "scores": [float(x) for x in SCORED.values()],
        "token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**found, **changes}.items()}
    return tokenizer_of_gguf(metadata, "m.gguf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["\u2581abc"]),  # bc first, whose score is best: a + bc, then with the space
        ("ab", ["\u2581", "ab"]),
        ("a b", ["\u2581a", "\u2581", "b"]),
        ("\n", ["\u2581", "<0x0A>"]),
        ("é", ["\u2581", "<0xC3>", "<0xA9>"]),
        ("z", ["\u2581", "<unk>"]),
    ],
)
def test_sentencepiece(text, expected):
    assert tokens(sentencepiece(), text) == expected


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's own loop: of all neighbours, those merge first whose token scores best."""
    pieces = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        known = [at for at, pair in enumerate(pairs) if pair in scores]
        if not known:
            return pieces
        best = max(known, key=lambda at: (scores[pairs[at]], -at))
        pieces[best : best + 2] = [pairs[best]]


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_merges_by_score(seed):
    generator = np.random.default_rng(seed)
    letters = ["a", "b", "c", "\u2581"]
    lengths = generator.integers(2, 6, 150)
    longer = {"".join(generator.choice(letters, length)) for length in lengths}
    vocab = [*letters, *sorted(longer)]
    scores = [0.0] * len(letters) + [float(-x) for x in generator.permutation(len(longer))]
    tokenizer = sentencepiece(
        tokens=["<unk>", *vocab], scores=[0.0, *scores], token_type=[2] + [1] * len(vocab),
        bos_token_id=0, eos_token_id=0, add_bos_token=False,
    )  # fmt: skip
    for _ in range(20):
        text = "".join(generator.choice(["a", "b", "c", " "], generator.integers(1, 25)))
        expected = merged_by_score(
            "\u2581" + text.replace(" ", "\u2581"), dict(zip(vocab, scores, strict=True))
        )
        assert tokens(tokenizer, text) == expected
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unused_tokens_are_not_merged():
    types = [2, 3, 3, 6, 6, 6] + [5 if token == "ab" else 1 for token in list(SCORED)[6:]]
    assert tokens(sentencepiece(token_type=types), "ab") == ["\u2581a", "b"]


def test_sentencepiece_texts():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("a bc\né")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "a bc\né"
    assert sentencepiece(add_bos_token=False).encode("a") == [list(SCORED).index("\u2581a")]
    bare = sentencepiece(add_space_prefix=False)
    assert tokens(bare, "a a") == ["a", "\u2581a"]
    assert bare.decode(bare.encode(" a")) == " a"
    assert tokenizer.encode("a</s>")[-1] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "the kind 'bert'; there is code for 'gpt2', 'llama'"),
        ({"pre": "poro-chat"}, "the kind 'poro-chat'; there is code for 'gpt-2'"),
        ({"pre": ["x"]}, "the kind \\['x'\\]; there is code for 'gpt-2'"),
    ],
)
def test_kinds_without_code(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        from_gguf(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": ["hell", "o"]},
        {"merges": ["no tokens"]},
        {"token_type": [1, 2]},
        {"bos_token_id": 10**6, "add_bos_token": True},
        {"model": "llama", "scores": [0.5]},
    ],
)
def test_metadata_that_do_not_fit(changes):
    with pytest.raises(ValueError, match="its tokenizer does not fit together"):
        from_gguf(**changes)


def test_tokenizer_json(tmp_path, gpt2_folder):
    """The file that most folders have: whatever it says holds, but no truncation or padding."""
    inner = byte_level(VOCAB, MERGES, KINDS["gpt-2"], special=[END])
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    folder = shutil.copytree(FOLDER / "phi", tmp_path / "model")
    inner.save(str(folder / "tokenizer.json"))
    model = models.load(folder, xp=np)
    expected = tokenizer_of_folder(gpt2_folder)
    for text in ("hello wor hello wor", *TEXTS):
        assert model.tokenizer.encode(text) == expected.encode(text)
    assert model.tokenizer is model.tokenizer


def test_ids_that_no_token_has_are_left_out(gpt2_folder):
    """Vocabularies are padded: Phi-2's has 943 ids that mean nothing."""
    assert tokenizer_of_folder(gpt2_folder).decode([VOCAB["hello"], 10**6]) == "hello"
    assert tokenizer_of_folder(gpt2_folder).decode(np.array([VOCAB["hello"]])) == "hello"


def test_folders_without_a_tokenizer(tmp_path):
    pytest.importorskip("safetensors")
    assert models.load(FOLDER / "phi", xp=np).tokenizer is None
    folder = shutil.copytree(FOLDER / "phi", tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(b"")
    model = models.load(folder, xp=np)  # its weights can be used all the same
    with pytest.raises(NotImplementedError, match=r"tokenizer\.model, a sentencepiece file"):
        _ = model.tokenizer


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("vocab.json", "{"),
        ("vocab.json", "5"),
        ("vocab.json", '["a"]'),
        ("vocab.json", '{"a": "x"}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": ["x"]}'),
        ("tokenizer_config.json", '{"chat_template": [{"template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": [], "template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 5}]}'),
        ("merges.txt", "no tokens"),
        ("merges.txt", "three to kens"),
    ],
)
def test_damaged_files(gpt2_folder, name, text):
    (gpt2_folder / name).write_text(text)
    with pytest.raises(ValueError, match="download the file again"):
        tokenizer_of_folder(gpt2_folder)


def test_text_is_a_string(gpt2_folder):
    with pytest.raises(TypeError, match="it must be a str"):
        tokenizer_of_folder(gpt2_folder).encode(["hello"])
    with pytest.raises(ValueError, match="no surrogates"):
        tokenizer_of_folder(gpt2_folder).encode("\udcff")


TEMPLATE = """{% for message in messages %}
    {% if message.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}
{{ bos_token }}{{ message.role }}: {{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
CHAT = [{"role": "user", "content": " Hello "}, {"role": "assistant", "content": "Hi"}]


def test_chats_are_written_by_the_template(gpt2_folder):
    pytest.importorskip("jinja2")
    path = gpt2_folder / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": {"content": "<b>"}, "chat_template": TEMPLATE}))
    tokenizer = tokenizer_of_folder(gpt2_folder)
    written = "<b>user: Hello\n<b>assistant: Hi\nassistant:"
    assert tokenizer.apply_chat_template(CHAT) == written
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False) == written[:-10]
    with pytest.raises(ValueError, match="no such role"):
        tokenizer.apply_chat_template([{"role": "odd", "content": ""}])
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert tokenizer_of_folder(gpt2_folder).apply_chat_template(CHAT) == "d"
    (gpt2_folder / "chat_template.jinja").write_text("{{ messages | length }} {{ extra }}")
    assert tokenizer_of_folder(gpt2_folder).apply_chat_template(CHAT, extra="x") == "2 x"
    assert from_gguf().chat_template is None


def test_models_without_a_template(gpt2_folder):
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer_of_folder(gpt2_folder).apply_chat_template(CHAT)


TOKENS = ["<unk>", "<s>", "a", "b", "ab", "\u2581"]
WHOLE = {
    "tokens": TOKENS, "token_type": [2, 3, 1, 1, 1, 1], "merges": ["a b"],
    "scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0], "bos_token_id": 1, "eos_token_id": 1,
    "unknown_token_id": 0, "padding_token_id": 0, "add_bos_token": True, "add_eos_token": False,
    "add_space_prefix": False, "pre": "smollm",
}  # fmt: skip
WRONG = [
    None, 5, -1, 1e300, True, "x", [], {}, [1], [None], [[1]], ["a"], ["a"] * 6, 2**40,
]  # fmt: skip


def tokenizer(kind: Any, **changes: Any) -> Any:
    given = {"model": kind, **WHOLE, **changes}
    named = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
    return tokenizer_of_gguf(named, "m.gguf")


@pytest.mark.filterwarnings("ignore:m.gguf does not name the way to cut text")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("key", [*WHOLE, "model"])
def test_metadata_of_another_type_are_refused_by_name(kind, key):
    assert tokenizer(kind).encode("ab") == [1, 4]
    refused = 0
    for value in WRONG:
        try:
            tokenizer(**{"kind": kind, **{"kind" if key == "model" else key: value}})
        except (ValueError, NotImplementedError) as failure:
            refused += 1
            assert "m.gguf: " in str(failure) and str(failure).count("; ") >= 2  # noqa: PT017
    # Some are of the right type; sentencepiece asks for no kind of words.
    assert refused >= (0 if (kind, key) == ("llama", "pre") else len(WRONG) - 3)
