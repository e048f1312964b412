"""Structs that kernels take by value: read by the names that they were written by."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.probes import Probe

from cupyattn.kernels.spec import Pointer
from cupyattn.kernels.structs.attention import (
    ATTENTION_PARAMS,
    ATTENTION_STRUCT,
    BACKWARD_PARAMS,
    BACKWARD_STRUCT,
)
from cupyattn.kernels.structs.walks import (
    elements_params,
    elements_struct,
    rows_params,
    rows_struct,
)

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


def test_attention_params_are_read_by_the_names_they_were_written_by():
    params = np.zeros((), ATTENTION_PARAMS)
    expected = []
    for name in ("q", "k", "v", "out", "lse"):
        params[name] = tuple(len(expected) + i + 1 for i in range(3))
        expected += params[name].tolist()
    for name in ("q_offsets", "seqused_k"):
        params[name] = tuple(len(expected) + i + 1 for i in range(2))
        expected += params[name].tolist()
    names = ATTENTION_PARAMS.names
    for name in (
        *names[names.index("q_offset") : names.index("scale_log2")],
        *names[names.index("together") :],
    ):
        params[name] = len(expected) + 1
        expected.append(len(expected) + 1)
    params["scale_log2"], params["softmax_scale"] = 0.625, 0.375
    probe = Probe(
        "params",
        Pointer("fields"),
        Pointer("scales"),
        ATTENTION_STRUCT,
        threads=1,
    )
    fields = np.zeros(len(expected), np.int64)
    fields, scales = probe.run(1, fields, np.zeros(2, np.float32), params)

    assert fields.tolist() == expected
    assert scales.tolist() == [0.625, 0.375]


def test_backward_params_are_read_by_the_names_they_were_written_by():
    params = np.zeros((), BACKWARD_PARAMS)
    params["attention"]["heads"] = 1
    expected = [1]
    for name in ("dout", "dlse", "dq", "dk", "dv", "dbias"):
        width = len(BACKWARD_PARAMS[name].names)
        params[name] = tuple(len(expected) + i + 1 for i in range(width))
        expected += params[name].tolist()
    for name in BACKWARD_PARAMS.names[BACKWARD_PARAMS.names.index("dsinks_stride") : -1]:
        params[name] = len(expected) + 1
        expected.append(len(expected) + 1)
    params["scale"] = 0.625
    probe = Probe(
        "backward_params",
        Pointer("fields"),
        Pointer("scale"),
        BACKWARD_STRUCT,
        threads=1,
    )
    fields = np.zeros(len(expected), np.int64)
    fields, scale = probe.run(1, fields, np.zeros(1, np.float32), params)

    assert fields.tolist() == expected
    assert scale == 0.625


def test_rows_params_give_each_row_its_offset():
    arrays, shape = 2, (2, 3, 1, 4)
    dtype = rows_params(arrays)
    params = np.zeros((), dtype)
    params["shape"] = shape
    params["strides"] = [(1000, 100, 10, 1), (-7, 0, 5, 70)]
    params["rows"], params["length"] = 24, 9
    probe = Probe(
        "rows_params",
        Pointer("fields"),
        Pointer("offsets"),
        rows_struct(arrays),
        threads=1,
        ARRAYS=arrays,
    )
    fields = np.zeros(4 + 4 * arrays + 2, np.int64)
    fields, offsets = probe.run(1, fields, np.zeros((arrays, 24), np.int64), params)

    assert fields.tolist() == [*shape, 1000, 100, 10, 1, -7, 0, 5, 70, 24, 9]
    index = np.indices(shape).reshape(4, -1).T
    assert_array_equal(offsets, (index @ params["strides"].T).T)


def test_elements_params_give_each_row_its_offset():
    arrays, shape = 2, (2, 3, 1, 4)
    params = np.zeros((), elements_params(arrays))
    params["shape"] = shape
    params["strides"] = [(1000, 100, 10, 1), (-7, 0, 5, 70)]
    params["offsets"] = [3, 500]
    params["length"], params["rows"], params["units"] = 9, 24, 2
    probe = Probe(
        "elements_params",
        Pointer("fields"),
        Pointer("offsets"),
        elements_struct(arrays),
        threads=1,
        ARRAYS=arrays,
    )
    fields = np.zeros(4 + 5 * arrays + 3, np.int64)
    fields, offsets = probe.run(1, fields, np.zeros((arrays, 24), np.int64), params)

    assert fields.tolist() == [*shape, 1000, 100, 10, 1, -7, 0, 5, 70, 3, 500, 9, 24, 2]
    index = np.indices(shape).reshape(4, -1).T
    assert_array_equal(offsets, (index @ params["strides"].T + params["offsets"]).T)
