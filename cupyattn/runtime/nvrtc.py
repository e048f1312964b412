"""NVRTC, NVIDIA's run-time compiler, called through ctypes: CuPy is not needed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

from cupyattn.runtime.fork import no_fork

_INSTALL = (
    "install NVRTC and the CUDA headers with pip install 'cupyattn[emulator]', or, with a GPU, "
    "'cupyattn[cuda12]' or 'cupyattn[cuda13]'"
)

_COMPILATION_FAILED = 6  # nvrtcResult NVRTC_ERROR_COMPILATION


class SourceRejectedError(Exception):
    """NVRTC found errors in a source; the argument is its log."""


class Nvrtc:
    """A loaded NVRTC.

    Attributes
    ----------
    version : tuple of int
        (major, minor).
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = c_char_p
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)

    def compile(
        self,
        name: bytes,
        text: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        options: Sequence[str],
        *,
        ptx: bool,
    ) -> tuple[bytes, str]:
        """Compile a source to PTX or to machine code (a cubin).

        Parameters
        ----------
        name, text
            The name and the text of the source.
        headers
            The names and the texts of the files that it includes.
        options
            Command-line options of NVRTC.
        ptx
            Return PTX, without the zero byte that ends it.

        Returns
        -------
        tuple
            The code, and the log of the compiler.

        Raises
        ------
        SourceRejectedError
            If the source has errors.
        RuntimeError
            If NVRTC fails in another way.
        """
        names, texts = (
            ((c_char_p * len(headers))(*part) for part in zip(*headers, strict=True))
            if headers
            else (None, None)
        )
        program = c_void_p()
        self._call(
            "nvrtcCreateProgram",
            byref(program),
            text,
            name,
            len(headers),
            texts,
            names,
        )
        try:
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            result = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if result == _COMPILATION_FAILED:
                raise SourceRejectedError(log)
            self._require("nvrtcCompileProgram", result, log)
            code = self._read("nvrtcGetPTX" if ptx else "nvrtcGetCUBIN", program)
            return (code.rstrip(b"\0") if ptx else code), log
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _read(self, function: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{function}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        self._require(function, getattr(self._library, function)(*arguments))

    def _require(self, function: str, result: int, log: str = "") -> None:
        if result:
            why = self._library.nvrtcGetErrorString(result).decode()
            raise RuntimeError(f"{function} of NVRTC failed: {why}" + (f"\n{log}" if log else ""))


@lru_cache(maxsize=1)
def load_nvrtc() -> Nvrtc:
    """Load NVRTC from its wheel, from Conda, or from an installed CUDA toolkit.

    Raises
    ------
    RuntimeError
        If it is not installed.
    """
    try:
        with no_fork():
            from cuda.pathfinder import load_nvidia_dynamic_lib

            return Nvrtc(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"compiling a kernel needs NVRTC, which did not load ({error}); {_INSTALL}"
        ) from error


@lru_cache(maxsize=1)
def toolkit_headers() -> Path:
    """Return the folder of cuda_fp16.h, from the runtime wheel or an installed toolkit.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    try:
        with no_fork():
            from cuda.pathfinder import find_nvidia_header_directory

            found = find_nvidia_header_directory("cudart")
    except ImportError:
        found = None
    if found and (Path(found) / "cuda_fp16.h").is_file():
        return Path(found)
    raise RuntimeError(f"cuda_fp16.h was not found; {_INSTALL}")
