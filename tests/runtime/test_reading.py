"""Files of others are read within limits of kind, size and nesting."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from cupyattn.runtime.errors import size_text
from cupyattn.runtime.reading import (
    MOST_NESTED,
    lines_of,
    open_regular,
    parsed,
    read_bytes,
    read_json,
    read_text,
)

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")


def refuse(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


READERS = {
    "bytes": lambda path: read_bytes(path, 100, refuse),
    "text": lambda path: read_text(path, 100, refuse),
    "json": lambda path: read_json(path, 100, refuse),
    "lines": lambda path: list(lines_of(path, 100, refuse)),
    "open": lambda path: open_regular(path, refuse).close(),
}


@posix
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_other_than_regular_files_are_refused_without_waiting(read, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    for path, what in ((fifo, "a FIFO"), (link, "a character device"), (tmp_path, "a directory")):
        with pytest.raises(ValueError, match=f"^{path}: it is {what}, not a regular file$"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


@posix
def test_no_descriptor_stays_open_after_a_refusal(tmp_path):
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        with pytest.raises(ValueError, match="a directory"):
            read_bytes(tmp_path, 100, refuse)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("name", ["bytes", "text", "json"])
def test_a_file_of_too_many_bytes_is_not_read(name, tmp_path):
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"sparse.json: it has 1099.51 GB, and at most 0.1 kB"):
            READERS[name](path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_of_the_most_bytes_is_read_and_of_one_more_refused(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100, refuse) == b"x" * 100
    path.write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="at most"):
        read_bytes(path, 100, refuse)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_a_file_that_says_it_is_empty_is_read_up_to_the_limit():
    path = Path("/proc/cpuinfo")
    assert path.stat().st_size == 0
    assert read_bytes(path, 1 << 24, refuse).count(b"processor") >= 1
    with pytest.raises(ValueError, match="cpuinfo: it has"):
        read_bytes(path, 10, refuse)


@posix
def test_memory_follows_the_size_of_a_file_that_grows(tmp_path, monkeypatch):
    """The file grows after its size was read."""
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 500_000)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda number: _empty(real(number)))
    with pytest.raises(ValueError, match=f"it has .*, and at most {size_text(100)}"):
        read_bytes(path, 100, refuse)


def _empty(found: os.stat_result) -> os.stat_result:
    values = list(found)
    values[6] = 0
    return os.stat_result(values)


def test_text_that_is_no_utf_8_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xe9\xe8")
    with pytest.raises(ValueError, match=r"text: no UTF-8 \('utf-8' codec"):
        read_text(path, 100, refuse)
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text(path, 100, refuse) == "a\nb\nc\n"


@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 900, 100_000, 3_000_000])
def test_json_that_is_nested_too_deeply_is_refused(depth):
    mixed = '{"a":' * depth + "1" + "}" * depth
    for text in (nested(depth), mixed, nested(depth).encode()):
        with pytest.raises(ValueError, match=f"m.json: .*nested more than {MOST_NESTED} deep"):
            parsed(text, "m.json", refuse)


def test_json_that_is_nested_as_deeply_as_allowed_is_read():
    assert parsed(nested(MOST_NESTED), "m.json", refuse) == json.loads(nested(MOST_NESTED))
    wide = [[[]] * 1000, {"a": {"b": [1]}}]
    assert parsed(json.dumps(wide), "m.json", refuse) == wide


@pytest.mark.parametrize("text", ["", "{", "[1,]", "1" * 5000, b"\xff", b"\xff\xfe{"])
def test_invalid_json_is_named(text):
    with pytest.raises(ValueError, match=r"^m\.json: no JSON \("):
        parsed(text, "m.json", refuse)


def test_constants_that_json_has_not_are_refused_where_asked():
    assert parsed("[Infinity]", "m.json", refuse) == [float("inf")]
    for text in ("NaN", "[-Infinity]"):
        with pytest.raises(ValueError, match=r"m\.json: no JSON \(.* is no JSON\)"):
            parsed(text, "m.json", refuse, constants=False)


def test_lines_come_with_their_numbers_and_a_longer_one_is_named(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\n" + b"x" * 99 + b"\nlast")
    found = list(lines_of(path, 100, refuse))
    assert found == [(1, b"one\n"), (2, b"\n"), (3, b"x" * 99 + b"\n"), (4, b"last")]
    with path.open("r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(ValueError, match=r"^line 4 of .*lines: it has more than 0\.1 kB$"):
        list(lines_of(path, 100, refuse))


@posix
def test_a_fifo_that_somebody_writes_to_is_refused_as_well(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def write() -> None:
        with suppress(BrokenPipeError), fifo.open("wb") as file:
            file.write(b"{}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    time.sleep(0.05)
    with pytest.raises(ValueError, match="it is a FIFO"):
        read_json(fifo, 100, refuse)
