"""A fork while another thread compiles or imports: the child can do the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes import environment
from support.search import mostly_deep

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is POSIX")

START = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork of a process with threads
seconds = 120

def child_of(work):
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)  # ends a child that hangs, with a status that is not 0
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child hung or failed"

def in_a_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
"""

COMPILE = """
from cupyattn.runtime import compile
from cupyattn.runtime.arch import arch_of
from cupyattn.ops.attention.kernels.teaching import forward
from cupyattn.ops.softmax import kernels as softmax
TURING = arch_of(75)
FIRST = softmax.BACKWARD.specialise(75, "float32", 100, 1)
ONE = forward.tiled(75, "float16", 64, 64)
OTHER = softmax.FORWARD.specialise(75, "float32", 100, 1)
run, within = compile._run_nvrtc, threading.Event()

def announced(*args, **options):
    within.set()
    return run(*args, **options)

def compile_both():
    assert compile.compile_ptx(ONE, TURING).was_cached, "the fork waited until it was there"
    assert not compile.compile_ptx(OTHER, TURING).was_cached

compile._run_nvrtc = announced
compile.compile_cubin(FIRST, TURING)  # imports, finds headers
within.clear()
thread = in_a_thread(lambda: compile.compile_ptx(ONE, TURING))
within.wait()
child_of(compile_both)
thread.join()
assert compile.compile_ptx(OTHER, TURING).was_cached
"""

EMULATOR = """
from cupyattn import emulator
from cupyattn.emulator import module as module_file

PTX = '''
.version 7.5
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
'''
module = emulator.load(PTX)
compile_kernel, within, may_end = module_file.compile_kernel, threading.Event(), threading.Event()

def slow(*args):
    within.set()
    may_end.wait()
    return compile_kernel(*args)

def launch():
    module_file.compile_kernel = compile_kernel
    emulator.launch(module, "nothing", 1, 32, [])

module_file.compile_kernel = slow
thread = in_a_thread(lambda: module.program("nothing"))
within.wait()
child_of(launch)
may_end.set()
thread.join()
"""

LAUNCH = """
import numpy as np
import cupyattn
from cupyattn import emulator

launch, within, may_end = emulator.launch, threading.Event(), threading.Event()

def slow(*args, **options):
    within.set()
    may_end.wait()
    launch(*args, **options)

def call():
    with cupyattn.backend("emulator"):
        cupyattn.softmax(np.ones((2, 40), np.float32))

def call_in_child():
    emulator.launch = launch
    call()

emulator.launch = slow
thread = in_a_thread(call)
within.wait()
child_of(call_in_child)
may_end.set()
thread.join()
"""

IMPORTS = """
from importlib.machinery import PathFinder
import numpy as np
import cupyattn

if "MODULE" != "cupyattn.functions":
    cupyattn.softmax

def call():
    CALL

class Slow(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "MODULE":
            return None
        spec = super().find_spec(name, path)
        run = spec.loader.exec_module

        def run_slowly(module):  # within the lock of this module
            within.set()
            time.sleep(0.2)
            run(module)

        spec.loader.exec_module = run_slowly
        return spec

within = threading.Event()
sys.meta_path.insert(0, Slow)
thread = in_a_thread(call)
assert within.wait(seconds), "the call does not import it"
seconds = 20  # of what takes about one
child_of(call)
thread.join()
"""

EMULATED = """
    x = np.ones((2, 40), np.float32)
    with cupyattn.backend("emulator"):
        cupyattn.softmax(x)
"""

FIRST_IMPORTS = {  # of a module: a first call that imports it
    "cupyattn.functions": EMULATED,
    "cupyattn.emulator": EMULATED,
    "cupyattn.runtime.device.emulated": EMULATED,
    "cuda.pathfinder": EMULATED,
    "ml_dtypes": "cupyattn.rope_tables(4, 8, dtype='bfloat16')",
    "cupyattn.models": "cupyattn.models.Config",
}

WITHIN = """
from cupyattn.runtime.fork import no_fork

with no_fork():
    child_of(lambda: None)  # its own thread does not wait for itself

left = threading.Event()

def enter_twice():
    with no_fork():
        with no_fork():
            pass
        within.set()
        time.sleep(0.2)
        left.set()

within = threading.Event()
thread = in_a_thread(enter_twice)
within.wait()
child_of(lambda: None)
assert left.is_set(), "the fork did not wait for the outer block"

def enter_and_leave():
    with no_fork():
        pass
    child_of(lambda: None)

child_of(enter_and_leave)
enter_and_leave()
"""


def succeeds(program: str) -> None:
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.nvrtc
def test_child_compiles_after_a_fork_during_compilation(empty_cache):
    """The child compiles the same kernel, whose lock the thread held, and another one."""
    succeeds(COMPILE)


def test_child_launches_after_a_fork_during_code_generation():
    succeeds(EMULATOR)


@pytest.mark.nvrtc
def test_child_launches_after_a_fork_during_a_launch():
    succeeds(LAUNCH)


@pytest.mark.parametrize(
    "module",
    mostly_deep(FIRST_IMPORTS, ("cupyattn.functions", "cuda.pathfinder", "ml_dtypes")),
)
@pytest.mark.nvrtc
def test_child_imports_after_a_fork_during_an_import(module):
    succeeds(IMPORTS.replace("CALL", FIRST_IMPORTS[module]).replace("MODULE", module))


def test_a_thread_may_fork_within_and_without():
    succeeds(WITHIN)
