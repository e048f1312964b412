"""PTX for the emulator's tests: NVRTC for ``.cu`` files, and kernels around single instructions."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import emulator
from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.source import texts_named_in
from cupyattn.runtime.spec import KernelSpec

KERNELS = Path(__file__).parent.parent / "emulator" / "kernels"


@cache
def compile_text(name: str, arch: Arch = TURING) -> str:
    """Compile ``emulator/kernels/<name>`` to PTX."""
    spec = KernelSpec(Path(name).stem, str(KERNELS / name), parameters=())
    return compile_ptx(spec.specialise(threads=32), arch).code.decode()


@cache
def compile_module(name: str, arch: Arch = TURING) -> emulator.Module:
    """Compile ``emulator/kernels/<name>`` and load it."""
    ptx = compile_text(name, arch)
    return emulator.load(ptx, texts_named_in(ptx, KERNELS / name))


def line_of(name: str, marker: str) -> int:
    """Return the number of the line of a kernel file that ends with `marker`."""
    lines = (KERNELS / name).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(marker)]
    assert len(found) == 1, (marker, found)
    return found[0]


_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def kernel_text(body: str, parameters: str = ".param .u64 p0", target: int = 75) -> str:
    """Return a module with one kernel that has plenty of registers declared."""
    return f"""
.version 8.0
.target sm_{target}
.address_size 64
.visible .entry k({parameters})
{{
  .reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %rd<64>;
  .reg .f32 %f<32>; .reg .f64 %fd<32>;
{body}
  ret;
}}
"""


def run_on_the_gpu(
    text: str, blocks: int, threads: int, x: np.ndarray, path: Path, *, shared_bytes: int = 0
) -> np.ndarray:
    """Return `x`, the argument of kernel k, as a GPU leaves it."""
    import cupy

    (path / "k.ptx").write_text(text)
    array = cupy.asarray(x)
    module = cupy.RawModule(path=str(path / "k.ptx"))
    module.get_function("k")((blocks,), (threads,), (array,), shared_mem=shared_bytes)
    result: np.ndarray = cupy.asnumpy(array)
    return result


@cache
def _operation_module(
    operation: str, result: str, kinds: tuple[str, ...], uniform: bool, target: int
) -> emulator.Module:
    sizes = {"pred": 4, "16": 2, "32": 4, "64": 8}

    def size_of(kind: str) -> int:
        return next(size for suffix, size in sizes.items() if kind.endswith(suffix))

    body = [
        "mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mov.u32 %r62, %ntid.x;",
        "mov.u32 %r63, 0;" if uniform else "mad.lo.s32 %r63, %r61, %r62, %r60;",
    ]
    operands = []
    for i, kind in enumerate(kinds):
        size = size_of(kind)
        register = {"pred": f"%p{i + 1}", "f32": f"%f{i + 1}", "f64": f"%fd{i + 1}"}.get(
            kind, f"%{ {2: 'h', 4: 'r', 8: 'rd'}[size] }{i + 1}"
        )
        body += [
            f"ld.param.u64 %rd60, [p{i}]; mul.wide.u32 %rd61, %r63, {size};",
            "add.s64 %rd62, %rd60, %rd61;",
        ]
        if kind == "pred":
            body += [f"ld.global.u32 %r59, [%rd62]; setp.ne.u32 {register}, %r59, 0;"]
        else:
            body += [
                f"ld.global.{'f' if kind[0] == 'f' and size > 2 else 'b'}{8 * size} "
                f"{register}, [%rd62];"
            ]
        operands.append(register)
    size = size_of(result)
    destination = {"pred": "%p0", "f32": "%f0", "f64": "%fd0"}.get(
        result, f"%{ {2: 'h', 4: 'r', 8: 'rd'}[size] }0"
    )
    text = operation.replace("$d", destination)
    for i, register in enumerate(operands):
        text = text.replace(f"${i}", register)
    body.append(text + ";")
    if result == "pred":
        body.append("selp.u32 %r0, 1, 0, %p0;")
        destination = "%r0"
    body += [
        f"ld.param.u64 %rd60, [p{len(kinds)}]; mul.wide.u32 %rd61, %r63, {size};",
        f"add.s64 %rd62, %rd60, %rd61; st.global.b{8 * size} [%rd62], {destination};",
    ]
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(kinds) + 1))
    return emulator.load(kernel_text("\n".join(body), parameters, target=target))


def apply(
    operation: str,
    result: str,
    dtype: Any,
    *operands: tuple[str, Any],
    uniform: bool = False,
    target: int = 75,
) -> np.ndarray:
    """Run one instruction on arrays, an element per thread.

    `operation` is PTX with ``$d`` for the target and ``$0``, ``$1``, ... for the operands;
    `operands` are (kind, values), kind a register type such as ``b32``, ``f32`` or ``pred``. With
    `uniform` all threads work on the first values: registers are then scalars, not arrays. The PTX
    is for sm_`target`.
    """
    arrays = [np.ascontiguousarray(values).ravel() for _, values in operands]
    count = max(a.size for a in arrays)
    arrays = [np.ascontiguousarray(np.broadcast_to(a, count)) for a in arrays]
    kinds = tuple(kind for kind, _ in operands)
    if "pred" in kinds:
        arrays = [
            a.astype(np.uint32) if k == "pred" else a for a, k in zip(arrays, kinds, strict=True)
        ]
    threads = min(count, 128)
    blocks = -(-count // threads)
    padded = [np.concatenate([a, np.zeros(blocks * threads - count, a.dtype)]) for a in arrays]
    out = np.zeros(blocks * threads, np.uint32 if result == "pred" else dtype)
    module = _operation_module(operation, result, kinds, uniform, target)
    emulator.launch(module, "k", blocks, threads, [*padded, out], checks=emulator.Checks.fast())
    return out[:count]
