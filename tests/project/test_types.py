"""The types of public calls, checked by mypy too, which refuses an unused `type: ignore`."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn
from cupyattn.runtime.arrays import Array

Q: Array = np.zeros((1, 2, 1, 8), np.float32)
X: Array = np.ones((2, 8), np.float32)


def test_an_array_cannot_be_a_list() -> None:
    with pytest.raises(TypeError, match="v has type"):
        cupyattn.attention(Q, Q, [1, 2])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="weight has type"):
        cupyattn.rms_norm(X, [1.0] * 8)  # type: ignore[call-overload]


def test_an_option_decides_the_type_of_the_result() -> None:
    out: Array = cupyattn.attention(Q, Q, Q)
    pair: tuple[Array, Array] = cupyattn.attention(Q, Q, Q, return_lse=True)
    wrong: Array = cupyattn.attention(Q, Q, Q, return_lse=True)  # type: ignore[assignment]
    assert out.shape == pair[0].shape
    assert isinstance(wrong, tuple)


@pytest.mark.parametrize("flag", [False, True])
def test_an_option_can_be_a_variable(flag: bool) -> None:
    results = (
        cupyattn.attention(Q, Q, Q, return_lse=flag),
        cupyattn.linear(X, X.T, return_preactivation=flag),
        cupyattn.rms_norm(X, return_stats=flag),
        cupyattn.layer_norm(X, return_stats=flag),
    )
    assert [isinstance(result, tuple) for result in results] == [flag] * 4
