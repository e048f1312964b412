"""Kernels of users: arguments, devices and errors."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import CUPY, dtype_of, kernels_only

import cupyattn
from cupyattn import Kernel, emulator, turing

# y[i] = sum of x over the threads of a CTA, plus shift where the macro ADD says so.
SUMS = """
#include "common/reduce.cuh"

extern "C" __global__ void sums(const float* x, float* y, float shift, int n) {
  extern __shared__ float total[];
  const int i = blockIdx.x * THREADS + threadIdx.x;
  float sum = i < n ? x[i] : 0.f;
  for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) total[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = ADD ? shift : 0.f;
    for (int warp = 0; warp < SHARED_BYTES / 4; ++warp) sum += total[warp];
    y[blockIdx.x] = sum;
  }
}
"""
BARRIER = "  __syncthreads();\n"
OPTIONS = {
    "inputs": ["x"],
    "outputs": ["y"],
    "scalars": {"shift": "float32", "n": np.int32},
    "threads": 64,
    "shared_bytes": 8,
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "sums.cu"
    path.write_text(SUMS)
    return path


@pytest.mark.parametrize("add", [0, 1])
@kernels_only
def test_arrays_scalars_macros_and_shared_memory_arrive(side, source, add):
    kernel = Kernel(source, **OPTIONS, macros={"ADD": add})
    x = np.arange(150, dtype=np.float32)
    y = side.put(np.zeros(3, np.float32))
    assert kernel(3, side.put(x), y, 0.5, 150) is None
    expected = np.add.reduceat(x, [0, 64, 128]) + 0.5 * add
    assert np.array_equal(side.get(y), expected)


@kernels_only
def test_its_source_may_name_bfloat16(side, tmp_path):
    """No macro names the dtype, unlike in the library's own kernels."""
    path = tmp_path / "widen.cu"
    path.write_text(
        '#include "common/numeric.cuh"\n'
        'extern "C" __global__ void widen(const bfloat16* x, float* y) {\n'
        "  y[threadIdx.x] = to_float(x[threadIdx.x]);\n"
        "}\n"
    )
    x = np.arange(64).astype(dtype_of("bfloat16"))
    y = side.put(np.zeros(64, np.float32))
    Kernel(path, inputs=["x"], outputs=["y"], threads=64)(1, side.put(x), y)
    assert np.array_equal(side.get(y), np.arange(64))


@kernels_only
def test_empty_grid_starts_nothing(side, source):
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    y = side.put(np.full(1, 7, np.float32))
    kernel(0, side.put(np.zeros(1, np.float32)), y, 0, 0)
    assert side.get(y)[0] == 7


@kernels_only
def test_the_entry_may_have_another_name_than_the_file(side, tmp_path, source):
    path = tmp_path / "other.cu"
    path.write_text(source.read_text())
    y = side.put(np.zeros(1, np.float32))
    kernel = Kernel(str(path), **OPTIONS, macros={"ADD": 1}, entry="sums")
    kernel(1, side.put(np.zeros(1, np.float32)), y, 2, 1)
    assert side.get(y)[0] == 2


@kernels_only
def test_a_source_that_was_changed_is_compiled_anew(side, source):
    x, y = side.put(np.ones(64, np.float32)), side.put(np.zeros(1, np.float32))
    for before, after, expected in (("", "", 64), ("sum += total", "sum -= total", -64)):
        source.write_text(SUMS.replace(before, after) if before else SUMS)
        Kernel(source, **OPTIONS, macros={"ADD": 0})(1, x, y, 0, 64)
        assert side.get(y)[0] == expected


@pytest.mark.nvrtc
def test_the_emulator_checks_it_and_counts_it(source):
    x, y = np.ones(64, np.float32), np.zeros(1, np.float32)
    report = emulator.Report()
    with cupyattn.backend("emulator", report=report):
        Kernel(source, **OPTIONS, macros={"ADD": 0})(1, x, y, 0, 64)
        assert report.bytes_moved["global load"] == x.nbytes
        source.write_text(SUMS.replace(BARRIER, ""))
        with pytest.raises(emulator.SharedMemoryRaceError, match=r"sums\.cu:12"):
            Kernel(source, **OPTIONS, macros={"ADD": 0})(1, x, y, 0, 64)
        source.write_text(SUMS.replace("i < n", "true"))
        with pytest.raises(emulator.OutOfBoundsError, match=r"the end of `x`.*float sum = true"):
            Kernel(source, **OPTIONS, macros={"ADD": 0})(2, x, y, 0, 64)
        source.write_text(SUMS.replace("y[blockIdx.x] = sum", "((float*)x)[0] = sum"))
        with pytest.raises(emulator.ConstWriteError, match="`x`"):
            Kernel(source, **OPTIONS, macros={"ADD": 0})(1, x, y, 0, 64)


@pytest.mark.nvrtc
def test_messages_quote_the_text_that_was_compiled(tmp_path):
    """The source file may have changed since the kernel was compiled."""
    racy = SUMS.replace(BARRIER, "")
    x, y = np.ones(64, np.float32), np.zeros(1, np.float32)
    for folder in ("first", "second"):
        source = tmp_path / folder / "sums.cu"
        source.parent.mkdir()
        source.write_text(racy)
        with (
            cupyattn.backend("emulator"),
            pytest.raises(emulator.SharedMemoryRaceError, match=r"sums\.cu:12: for \(int warp = 0"),
        ):
            Kernel(source, **OPTIONS, macros={"ADD": 0})(1, x, y, 0, 64)
        source.write_text("// another text\n" * 20)


@pytest.mark.nvrtc
def test_analyse_accepts_a_kernel(source):
    pytest.importorskip("cuda.pathfinder")
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    try:
        figures = turing.analyse(kernel.specialisation)
    except turing.DisassemblerError as missing:
        pytest.skip(str(missing))
    assert figures.shared_bytes == 8
    assert figures.ctas_per_sm == 16, "1,024 threads by 64"


@pytest.mark.nvrtc
def test_compiler_log_is_in_the_error(source):
    source.write_text(SUMS.replace("float sum", "flot sum"))
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    with cupyattn.backend("emulator"), pytest.raises(RuntimeError, match='"flot" is undefined'):
        kernel(1, np.ones(1, np.float32), np.ones(1, np.float32), 0, 1)


def test_numpy_arrays_need_the_emulator(source):
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    x = np.zeros(64, np.float32)
    with pytest.raises(NotImplementedError, match=r"sums got NumPy arrays; .*backend\(\"emulator"):
        kernel(1, x, x, 0, 64)


X = np.zeros(64, np.float32)
READ_ONLY = np.broadcast_to(np.float32(0), 64)
CROOKED = np.zeros(260, np.uint8)[1:257].view(np.float32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((1, X, X, 0), TypeError, "sums got 3 arguments; it takes x, y, shift, n; pass"),
        ((1, X, None, 0, 64), TypeError, "y is None"),
        (
            (1, X.astype(float), X, 0, 64),
            TypeError,
            r"x has dtype float64; the source declares const float\* x, items of float32; "
            r"convert it, x\.astype\('float32'\)",
        ),
        (
            (1, X, X.view(np.int32), 0, 64),
            TypeError,
            "y has dtype int32; .*declares float.* y, .*"
            "make a writable, C-contiguous array before the call",
        ),
        ((1, X, 5, 0, 64), TypeError, "y has type builtins.int"),
        ((1, X, X, 0, None), TypeError, "NoneType"),
        *(
            ((1, X, X, 0, n), TypeError, "n is .* of type .*; kernels take n as int32, an integer;")
            for n in (0.5, np.float32(2), "7", b"5", [3], np.ones(2, int))
        ),
        *(
            ((1, X, X, shift, 64), TypeError, "shift as float32, a real number; convert it with f")
            for shift in ("1.5", b"1", 1j, X, None)
        ),
        ((1, X, X, 0, 2**31), ValueError, "n = 2147483648; .*; pass a number in this range, or"),
        *(
            ((1, X, X, shift, 64), ValueError, r"shift = .*float32, -3.40282e\+38 to .*; pass a n")
            for shift in (1e300, -1e39, 10**400, np.float64(1e300))
        ),
        ((1, X, READ_ONLY, 0, 64), ValueError, "y is read-only; results are written into it; make"),
        ((1, X[::2], X, 0, 64), ValueError, r"x of shape \(32,\) has strides \(8,\); .*contiguous"),
        ((1, CROOKED, X, 0, 64), ValueError, "x starts 1 bytes into an item"),
        ((-1, X, X, 0, 64), ValueError, "ctas = -1; it is 0 to 2147483647"),
        ((1.0, X, X, 0, 64), TypeError, "ctas is 1.0 of type float"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(source, arguments, kind, message):
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    with cupyattn.backend("emulator"), pytest.raises(kind, match=message):
        kernel(*arguments)
    assert not X.any()


@pytest.mark.gpu
def test_numpy_and_cupy_arrays_are_not_mixed(source):
    kernel = Kernel(source, **OPTIONS, macros={"ADD": 0})
    with pytest.raises(TypeError, match="NumPy"):
        kernel(1, CUPY.put(X), X, 0, 64)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"outputs": []}, ValueError, "outputs is empty"),
        ({"outputs": "y"}, TypeError, r"outputs is 'y'; .* outputs=\['x'\]"),
        ({"inputs": [1]}, TypeError, r"inputs is \[1\]"),
        ({"inputs": ["y"]}, ValueError, "the parameters are y, y, shift, n; each has a name"),
        ({"scalars": {"n": "number"}}, TypeError, "number"),
        (
            {"inputs": ["z"]},
            ValueError,
            r"the parameters of sums were given as z, y, shift, n; the "
            r"source declares const float\* x, float\* y, float shift, int n; name all parameters",
        ),
        ({"scalars": {"n": "int32", "shift": "float32"}}, ValueError, "given as x, y, n, shift"),
        ({"scalars": {"shift": "float32"}}, ValueError, "given as x, y, shift; the source"),
        (
            {"inputs": ["x", "y", "shift"], "outputs": ["n"], "scalars": {}},
            ValueError,
            "shift is among the arrays; the source declares float shift; name it in scalars",
        ),
        (
            {"inputs": [], "outputs": ["x", "y"]},
            ValueError,
            r"x is among the outputs; the source declares const float\* x, which is not written",
        ),
        (
            {"scalars": {"shift": "float64", "n": "int32"}},
            TypeError,
            "shift is a scalar of dtype float64; the source declares float shift, a number of "
            "float32; give it that dtype, 'shift': 'float32'",
        ),
        ({"scalars": ["shift", "n"]}, TypeError, r"scalars is \['shift', 'n'\]; it maps the names"),
        ({"scalars": {"shift": "float32", "n": None}}, TypeError, "dtype of n is None; a scalar"),
        ({"scalars": {"shift": "float32", "n": "O"}}, TypeError, "dtype of n is 'O'; a scalar"),
        ({"macros": ["ADD"]}, TypeError, r"macros is \['ADD'\]; it maps names to values"),
        *(
            ({"macros": {name: 3}}, ValueError, f"macros has {name}; a Kernel sets THREADS, SHARED")
            for name in ("THREADS", "SHARED_BYTES", "BFLOAT16")
        ),
        ({"entry": 3}, TypeError, "the entry is 3; it is the name of a __global__ function"),
        ({"entry": "../x"}, ValueError, r"the entry is '\.\./x'; it is the name"),
        ({"threads": 0}, ValueError, "threads = 0; it is 1 to 1024"),
        ({"threads": True}, TypeError, "threads is True"),
        ({"shared_bytes": 65537}, ValueError, "shared_bytes = 65537; it is 0 to 65536"),
    ],
)
def test_invalid_parameters_are_refused(source, change, kind, message):
    with pytest.raises(kind, match=message):
        Kernel(source, **{**OPTIONS, **change})


@kernels_only
def test_a_string_is_the_source_itself(side):
    y = side.put(np.zeros(1, np.float32))
    kernel = Kernel(SUMS, **OPTIONS, macros={"ADD": 1})
    assert repr(kernel) == "<Kernel sums[ADD=1] of 64 threads>"
    kernel(1, side.put(np.ones(64, np.float32)), y, 2, 64)
    assert side.get(y)[0] == 66


@pytest.mark.nvrtc
def test_faults_quote_the_lines_of_a_string():
    kernel = Kernel(SUMS.replace(BARRIER, ""), **OPTIONS, macros={"ADD": 0})
    with (
        cupyattn.backend("emulator"),
        pytest.raises(emulator.SharedMemoryRaceError, match=r"sums\.cu:12: for \(int warp = 0"),
    ):
        kernel(1, np.ones(64, np.float32), np.zeros(1, np.float32), 0, 64)


def test_a_string_with_two_kernels_needs_the_entry():
    both = SUMS + SUMS.replace("sums", "others")
    with pytest.raises(ValueError, match=r"source are sums, others; .*pass its name as entry="):
        Kernel(both, **OPTIONS)
    assert repr(Kernel(both, **OPTIONS, entry="others")).startswith("<Kernel others")
    with pytest.raises(ValueError, match="__global__ functions of the source are none"):
        Kernel("float x;\n", **OPTIONS)


@pytest.mark.parametrize(
    "source",
    [
        "__global__ void f({}) {{ }}",
        "inline float g() {{ return 2; }}\n#define N 3\nstatic __global__ void f({}) {{ }}",
        'extern "C" {{ void g(); }}\nnamespace a {{ __global__ void f({}) {{ }} }}',
        '// extern "C"\nvoid __global__ f({}) {{ }}',
    ],
)
def test_a_kernel_without_extern_c_is_refused(source, tmp_path):
    text = source.format("const float* x, float* y")
    (tmp_path / "f.cu").write_text(text)
    for given in (text, tmp_path / "f.cu"):
        with pytest.raises(
            ValueError, match=r'without extern "C"; .*; write extern "C" __global__'
        ):
            Kernel(given, inputs=["x"], outputs=["y"], threads=32)


@pytest.mark.parametrize(
    "source",
    [
        'extern "C" {{ struct S {{ int n; }}; __global__ void f({}) {{ }} }}',
        'extern /* named */ "C" void __global__ f({}) {{ }}',
        'extern "C" __global__ void f({});\n__global__ void f({}) {{ }}',
        '#define BEGIN extern "C" {{\nBEGIN\n__device__ void g();\n__global__ void f({}) {{ }}\n}}',
        "EXPORT __global__ void f({}) {{ }}",
        '#define F __global__ void f({}) {{ }}\nextern "C" F',
        'extern "C" __global__ [[maybe_unused]] void f({}) {{ }}',
    ],
)
def test_a_kernel_that_may_be_extern_c_is_accepted(source):
    parameters = "const float* x, float* y"
    Kernel(source.format(parameters, parameters), inputs=["x"], outputs=["y"], threads=32)


@pytest.mark.nvrtc
def test_a_mangled_name_is_explained_at_the_call():
    source = "#define HEAD __global__ void\nHEAD f(float* y) { }\n"
    kernel = Kernel(source, entry="f", outputs=["y"], threads=32)
    message = r"no kernel 'f' in the module; it has .*; declare it extern \"C\" __global__"
    with cupyattn.backend("emulator"), pytest.raises(emulator.LaunchError, match=message):
        kernel(1, X.copy())


HEAD = 'extern "C" __global__ void __launch_bounds__(THREADS, 2) k'
DECLARED = {
    "const float* x": "float32",
    "float const *__restrict__ x": "float32",
    "const std::int64_t x[]": "int64",
    "const unsigned long long int* const x": "uint64",
    "const unsigned char* x /* float* x */": "uint8",
    "const unsigned* x // one, float* two": "uint32",
    "const __half* x": "float16",
    "const bfloat16* x": "bfloat16",
    "const DTYPE* x": "float16",
    "const Item* x": "int16",
    "const Other* x": "float64",
    "const Either* x": None,
    "const float4* x": None,
    "const char* x": None,
    "const void*": None,
    "const float** x": None,
    "Pointer x": None,
    "View<float, 2> x": None,
    "[[maybe_unused]] const float* x": "float32",
    "const float* x [[maybe_unused]]": "float32",
    "const float* x = nullptr": "float32",
    "const int* x = at(1, 2)": "int32",
    "const Inner* x": None,
    "const Defined* x": None,
    "const Both* x": None,
    "const Outer* x": "int64",
}
ALIASES = """
using Item = short;
typedef double Number;
#define Other Number
namespace inner {
using Inner = short;
typedef float Defined;
  using Both = short;
struct Named { int n; };
}
  using Both = int;
typedef long long Outer;
#if ADD
#define Either float
#else
#define Either int
#endif
"""


@pytest.mark.parametrize("text", DECLARED)
def test_the_dtype_of_a_pointer_is_read_from_the_source(text):
    dtype = DECLARED[text]
    source = f"{ALIASES}/* {HEAD}(int n) {{ */\n{HEAD}(\n{text}\n, float* y) {{ }}"
    kernel = Kernel(source, inputs=["x"], outputs=["y"], threads=32, macros={"DTYPE": "float16"})
    y = np.zeros(32, np.float32)
    for given in ("float32", "float64", "int16", "int64", "uint8", "uint32", "uint64", "bfloat16"):
        fits = dtype is None or dtype == given
        kind, message = (NotImplementedError, "NumPy") if fits else (TypeError, f"dtype {given}; ")
        with pytest.raises(kind, match=message):
            kernel(1, np.zeros(32, dtype_of(given)), y)


def test_a_float32_scalar_is_no_double():
    source = f"{HEAD}(double* y, double factor) {{ }}"
    with pytest.raises(TypeError, match="a number of float64; give it that dtype"):
        Kernel(source, outputs=["y"], scalars={"factor": "float32"}, threads=32)


@pytest.mark.parametrize(
    "text",
    ["int n = 3", "int n = (1 < 2)", "int n = 1 << 3", "int n = A<1, 2>::n, int m = f(4, 5)"],
)
def test_default_values_are_no_part_of_a_declaration(text):
    scalars = dict.fromkeys(["n", "m"] if " m " in text else ["n"], "int32")
    Kernel(f"{HEAD}(float* y, {text}) {{ }}", outputs=["y"], scalars=scalars, threads=32)
    scalars["n"] = "int64"
    with pytest.raises(TypeError, match="declares int n, a number of int32"):
        Kernel(f"{HEAD}(float* y, {text}) {{ }}", outputs=["y"], scalars=scalars, threads=32)


def test_declarations_are_found_in_included_files(tmp_path):
    (tmp_path / "sums.cuh").write_text(SUMS)
    (tmp_path / "sums.cu").write_text('#include "sums.cuh"\n')
    Kernel(tmp_path / "sums.cu", **OPTIONS)
    with pytest.raises(ValueError, match="given as a, b; the source declares const float"):
        Kernel(tmp_path / "sums.cu", inputs=["a"], outputs=["b"], threads=64)


def test_dtypes_that_depend_on_conditions_are_not_compared():
    variants = "\n".join(f"{HEAD}({dtype}* y, int n) {{ }}\n#else" for dtype in ("float", "int"))
    kernel = Kernel(f"#if 1\n{variants}\n#endif", outputs=["y"], scalars={"n": "int32"}, threads=32)
    with pytest.raises(NotImplementedError, match="NumPy"):
        kernel(1, X.view(np.int32), 3)


def test_a_declaration_by_a_macro_is_not_compared():
    source = f"#define KERNEL(name) {HEAD}##name(float* y)\nKERNEL(s) {{ }}\n"
    kernel = Kernel(source, entry="ks", inputs=["a"], outputs=["b"], threads=64)
    with pytest.raises(NotImplementedError, match="NumPy"):
        kernel(1, X, X)


@pytest.mark.parametrize("named", ["float x; " * 500, "a\0b", "none.cu"])
def test_a_string_that_is_neither_a_file_nor_a_source(named):
    with pytest.raises(FileNotFoundError, match="neither a file nor a source with __global__"):
        Kernel(named, **OPTIONS)


@pytest.mark.parametrize("given", [SUMS.encode(), 3, None])
def test_a_source_of_another_type(given):
    with pytest.raises(TypeError, match=r"the source has type .*; it is a path, or a string of"):
        Kernel(given, **OPTIONS)


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.cu is no file; .*write it"):
        Kernel(tmp_path / "none.cu", **OPTIONS)
    (tmp_path / "two-words.cu").write_text(SUMS)
    with pytest.raises(ValueError, match=r"the entry is 'two-words'; .* pass its name as entry="):
        Kernel(tmp_path / "two-words.cu", **OPTIONS)


def test_repr(source):
    assert (
        repr(Kernel(source, **OPTIONS, macros={"ADD": 1})) == "<Kernel sums[ADD=1] of 64 threads>"
    )
