"""Files that are no files, too large or nested too deeply are refused by name, and not read."""

from __future__ import annotations

import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
gguf = pytest.importorskip("gguf")

from safetensors.numpy import load_file, save_file  # noqa: E402
from support.archives import unpacked  # noqa: E402
from support.gguf_files import tensors_of, write_gguf  # noqa: E402
from support.tiny_models import TINY  # noqa: E402

from cupyattn import models  # noqa: E402
from cupyattn.models.checkpoints.bitsandbytes import STATE, unpacked_nf4  # noqa: E402
from cupyattn.models.checkpoints.gguf import read_gguf  # noqa: E402
from cupyattn.models.checkpoints.hugging_face import open_folder  # noqa: E402
from cupyattn.models.checkpoints.safetensors_files import read_safetensors  # noqa: E402
from cupyattn.models.tokenizer import tokenizer_of_folder  # noqa: E402
from cupyattn.models.training import curve  # noqa: E402
from cupyattn.models.training.data import Reader  # noqa: E402

HERE = Path(__file__).parent
Q4_0 = gguf.GGMLQuantizationType.Q4_0
posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")


@contextmanager
def cheap() -> Iterator[None]:
    """Within a second or so and a few megabytes of memory."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        assert time.monotonic() - begun < 20
    finally:
        tracemalloc.stop()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nested(path: Path) -> None:
    path.write_text('{"x": ' + "[" * 500_000 + "]" * 500_000 + "}")


KINDS: dict[Callable[[Path], None], str] = {
    a_fifo: "it is a FIFO, not a regular file",
    a_device: "it is a character device, not a regular file",
    a_directory: "it is a directory, not a regular file",
    a_terabyte: "it has 1099.51 GB, and at most",
    nested: "no JSON that is read: it is nested more than 64 deep",
}
FILES: dict[str, Callable[[Path], Any]] = {
    "config.json": open_folder,
    "generation_config.json": open_folder,
    "tokenizer_config.json": tokenizer_of_folder,
    "tokenizer.json": tokenizer_of_folder,
    "vocab.json": tokenizer_of_folder,
    "merges.txt": tokenizer_of_folder,
}


@posix
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_folder_that_is_none_is_refused_by_name(name, make, tmp_path):
    shutil.copytree(unpacked(HERE / "checkpoints.zip") / "gpt2", tmp_path, dirs_exist_ok=True)
    for other, text in (("vocab.json", "{}"), ("merges.txt", "")):
        (tmp_path / other).write_text(text)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    message = KINDS[make]
    if make is nested and name == "tokenizer.json":
        message = "Cannot instantiate Tokenizer"  # the package's own
    if make is nested and name == "merges.txt":
        message = "out of vocabulary"
    with cheap(), pytest.raises(ValueError, match=f"{tmp_path}.*{name}: .*{message}"):
        FILES[name](tmp_path)


@posix
@pytest.mark.parametrize("make", [a_terabyte, nested])
def test_an_index_that_is_none_is_refused_by_name(make, tmp_path):
    make(tmp_path / "model.safetensors.index.json")
    with cheap(), pytest.raises(ValueError, match=f"index.json: {KINDS[make]}"):
        open_folder(tmp_path)


@posix
@pytest.mark.parametrize("make", [a_fifo, a_device])
def test_a_gguf_file_that_is_none_is_refused_by_name(make, tmp_path):
    make(tmp_path / "m.gguf")
    with cheap(), pytest.raises(ValueError, match=f"m.gguf: {KINDS[make]}"):
        models.load(tmp_path / "m.gguf", xp=np)


@posix
@pytest.mark.parametrize("make", [a_fifo, a_device])
def test_data_and_losses_that_are_no_files_are_refused_by_name(make, tmp_path):
    path = tmp_path / "lines.jsonl"
    make(path)
    reader = Reader(None, None, 8)  # type: ignore[arg-type]
    for read in (reader.read, curve.read):
        with cheap(), pytest.raises(ValueError, match=f"lines.jsonl: {KINDS[make]}"):
            read(path)


def test_a_quant_state_that_is_nested_or_too_large_is_refused(tmp_path):
    stored = load_file(HERE / "packed" / "nested.safetensors")
    name = next(each for each in stored if STATE in each)
    for content, message in (
        (b"[" * 50_000, f"{name}: no JSON that is read: it is nested more than 64 deep"),
        (b" " * (1 << 17), f"{name}: it has 131.1 kB, and at most 65.5 kB are read"),
    ):
        path = tmp_path / "m.safetensors"
        save_file({**stored, name: np.frombuffer(content, np.uint8)}, path)
        with cheap(), pytest.raises(ValueError, match=message) as caught:
            unpacked_nf4(read_safetensors(path))
        assert str(path) in str(caught.value)


def test_a_large_tensor_of_one_axis_in_a_sparse_file_takes_no_memory(tmp_path):
    """8 GiB of Q4_0, which are 64 GiB of floats; read are the numbers that are asked for."""
    path = tmp_path / "m.gguf"
    blocks = (8 << 30) // 18
    name = b"blk.0.attn_norm.weight"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32 * blocks, Q4_0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    begin = -(-len(header) // 32) * 32
    with path.open("wb") as file:
        file.write(header)
        file.truncate(begin + 18 * blocks)
        file.seek(begin + 18 * 1000)
        file.write(np.float16(2).tobytes() + bytes([0x98] * 16))
    with cheap():
        tensor = read_gguf(path).tensors[name.decode()]
        assert tensor.shape == (32 * blocks,)
        found = tensor.read(32 * 1000 - 3, 32 * 1000 + 18)
        np.testing.assert_array_equal(found, [0] * 3 + [0] * 16 + [2] * 2)
        assert len(tensor.read(32 * blocks - 5, 32 * blocks)) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rope_freqs.weight", r"rope_freqs.weight is \(\d+,\), not \(8,\)"),
        ("blk.0.attn_q.bias", r"misshapen: blk.0.attn_q.bias is|unknown: blk.0.attn_q.bias"),
        ("blk.0.ffn_norm.bias", "unknown: blk.0.ffn_norm.bias"),
    ],
)
def test_a_large_tensor_that_the_model_has_no_use_for_is_not_read(name, message, tmp_path):
    model = models.random(TINY["llama"], dtype="float32", xp=np, seed=1)
    assert model.config.rotary_dim == 16
    tensors = {**tensors_of(model, "llama"), name: np.zeros(32, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors=tensors)
    content = path.read_bytes()
    at = content.index(name.encode()) + len(name) + 4  # after its name and its number of axes
    items = 1 << 32
    info = struct.pack("<QIQ", items, gguf.GGMLQuantizationType.F32, 1 << 30)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(info)
        file.truncate((1 << 30) + (items + 1024) * 4)
    with cheap(), pytest.raises(ValueError, match=message):
        models.load(path, xp=np)


def gguf_of(path: Path, keys: int, metadata: bytes, size: int | None = None) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, keys) + metadata)
    if size is not None:
        with path.open("r+b") as file:
            file.truncate(size)
    return path


def a_list(inner: int, count: int) -> bytes:
    return struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, inner, count)


def test_three_million_empty_lists_are_refused(tmp_path):
    empty = struct.pack("<IQ", 4, 0)
    path = gguf_of(tmp_path / "m.gguf", 1, a_list(9, 3_000_000) + 3_000_000 * empty)
    with cheap(), pytest.raises(ValueError, match=r"m\.gguf: a list of lists at byte"):
        models.load(path, xp=np)


@pytest.mark.parametrize("inner", [0, 4, 7, 8, 12])
def test_a_list_in_a_sparse_file_that_is_too_long_is_refused(inner, tmp_path):
    metadata = a_list(inner, 1 << 34)
    path = gguf_of(tmp_path / "m.gguf", 1, metadata, size=1 << 40)
    with cheap(), pytest.raises(ValueError, match=r"m\.gguf: \d+ bytes at \d+ before the tensors"):
        models.load(path, xp=np)


def test_a_key_that_comes_twice_is_refused(tmp_path):
    one = struct.pack("<Q", 1) + b"x" + struct.pack("<IB", 0, 1)
    path = gguf_of(tmp_path / "m.gguf", 1 << 40, one + one, size=1 << 40)
    with cheap(), pytest.raises(ValueError, match=r"m\.gguf: 'x' occurs a second time at byte"):
        models.load(path, xp=np)
