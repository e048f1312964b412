"""Translations of kernels on the disk: they do what new ones do, and damaged ones are made anew."""

from __future__ import annotations

import marshal
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.permissions import read_only
from support.ptx import compile_module, line_of

from cupyattn import backend, emulator, softmax
from cupyattn.emulator import OutOfBoundsError, Report, module
from cupyattn.runtime import folders
from cupyattn.runtime.device import emulated

pytestmark = pytest.mark.nvrtc
FILE = "faults.cu"

PTX = """
.version 8.0
.target sm_75
.address_size 64
.global .align 4 .u32 counter = 7;
.visible .entry add(.param .u64 x)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [x];
  ld.global.u32 %r1, [counter];
  add.u32 %r1, %r1, 3;
  st.global.u32 [%rd1], %r1;
  ret;
}"""


class Kept(dict):
    """Translations in memory."""

    def find(self, key: str) -> bytes | None:
        return self.get(key)

    keep = dict.__setitem__


@pytest.fixture
def never_translated(monkeypatch):
    """Raise an error for any further translation."""

    def translate(*_):
        raise AssertionError("translated again")

    return lambda: monkeypatch.setattr(module, "compile_kernel", translate)


@pytest.fixture
def forget(empty_cache, monkeypatch):
    """Clear the modules that this process has loaded, before and after the test."""
    emulated._module.cache_clear()
    yield emulated._module.cache_clear
    emulated._module.cache_clear()


def call() -> tuple[np.ndarray, dict]:
    x = np.random.default_rng(0).standard_normal((9, 40)).astype(np.float16)
    report = Report()
    with backend("emulator", report=report):
        return softmax(x), report.instruction_mix


def test_a_kept_translation_does_the_same(empty_cache, forget, never_translated):
    expected, mix = call()
    assert list(empty_cache.glob("softmax_forward-*.translation"))
    forget()
    never_translated()
    found, again = call()
    np.testing.assert_array_equal(found, expected)
    assert again == mix


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes({"cut": data[:100], "zeros": bytes(len(data)), "empty": b""}[how])


@pytest.mark.parametrize("how", ["cut", "zeros", "empty"])
def test_damaged_translation_is_made_again(empty_cache, forget, how):
    expected, _ = call()
    (path,) = empty_cache.glob("*.translation")
    whole = path.read_bytes()
    damage(path, how)
    forget()
    np.testing.assert_array_equal(call()[0], expected)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "bad", [b"", b"nothing", zlib.compress(b""), zlib.compress(marshal.dumps((1, 2)))], ids=range(4)
)
def test_bytes_that_are_no_translation(bad):
    kept, x = Kept(), np.zeros(1, np.uint32)
    for _ in range(2):
        loaded = emulator.load(PTX, translations=kept)
        emulator.launch(loaded, "add", 1, 1, [x])
        assert x == 10
        (key,) = kept
        kept[key] = bad


def test_variables_have_their_values(never_translated):
    kept, x = Kept(), np.zeros(1, np.uint32)
    emulator.load(PTX, translations=kept).program("add")
    never_translated()
    loaded = emulator.load(PTX, translations=kept)
    loaded.symbol("counter").view(np.uint32)[:] = 20
    emulator.launch(loaded, "add", 1, 1, [x])
    assert x == 23


def test_other_ptx_kernels_and_emulators_have_other_keys(monkeypatch):
    keys = {module.translation_key(*each) for each in ((b"1", "a"), (b"2", "a"), (b"1", "b"))}
    monkeypatch.setattr(module, "_emulator_digest", lambda: b"another")
    assert len(keys | {module.translation_key(b"1", "a")}) == 4


@pytest.mark.parametrize("kernel", ["load_shifted", "shared_overrun", "race_of_half_a_warp"])
def test_everything_of_a_program_comes_back(kernel):
    made = compile_module(FILE).program(kernel)
    data = module.Translation(made, []).to_bytes()
    back = module.Translation.from_bytes(data, made.header).program
    assert back.source == made.source
    assert list(map(str, back.instructions)) == list(map(str, made.instructions))
    assert [x.location for x in back.instructions] == [x.location for x in made.instructions]
    assert vars(back.layout) == vars(made.layout)
    for name in ("blocks", "shared_granule", "partial_warp_barriers", "local_bytes", "header"):
        assert getattr(back, name) == getattr(made, name)
    assert {n: x.tobytes() for n, x in back.constants.items()} == {
        n: x.tobytes() for n, x in made.constants.items()
    }


def test_faults_name_their_lines(monkeypatch):
    loaded = compile_module(FILE)
    made = loaded.program("load_shifted")
    data = module.Translation(made, []).to_bytes()
    back = module.Translation.from_bytes(data, made.header).program
    monkeypatch.setitem(loaded._programs, "load_shifted", back)
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(OutOfBoundsError) as found:
        emulator.launch(loaded, "load_shifted", 1, 32, [x, y, np.int32(1)])
    assert found.value.line == line_of(FILE, "// LOAD")


def test_a_warmed_folder_without_translations_that_can_only_be_read(
    empty_cache, forget, monkeypatch
):
    """Each process makes its translations, without a warning: nothing is lost."""
    expected, _ = call()
    for path in empty_cache.glob("*.translation*"):
        path.unlink()
    forget()
    with read_only(empty_cache) as folder:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
        folders.cache_directory.cache_clear()
        np.testing.assert_array_equal(call()[0], expected)  # a warning would be an error
        assert not list(folder.glob("*.translation"))
