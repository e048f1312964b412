"""README's generator, and the same model without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.readme import examples

import cupyattn


def readme_names(library: str = "numpy") -> dict[str, Any]:
    """Run README's examples, those before the generator too, and return their names."""
    names: dict[str, Any] = {}
    for example in examples():
        source = example.replace("import numpy as np", f"import {library} as np")
        exec(compile(source, "README.md", "exec"), names)
        if "scheduler" in names:
            return names
    raise AssertionError("README has no generator")


def dense_logits(
    names: dict[str, Any], tokens: Sequence[int], dtype: Any = np.float32, **options: Any
) -> Any:
    """The logits behind each of the tokens: README's model, with dense attention over all."""
    H, G, D = (names[name] for name in "HGD")  # noqa: N806

    def on_host(array: Any) -> np.ndarray:
        return (array if isinstance(array, np.ndarray) else array.get()).astype(dtype)

    x = cupyattn.embedding(on_host(names["table"]), np.array(tokens))[None]
    rotary = [on_host(angles) for angles in names["rotary"]]
    for w in ({name: on_host(each) for name, each in of.items()} for of in names["layers"]):
        qkv = cupyattn.linear(cupyattn.rms_norm(x), w["qkv"])
        qkv = qkv.reshape(1, len(tokens), H + 2 * G, D)
        q, k = cupyattn.rope((qkv[:, :, :H], qkv[:, :, H : H + G]), *rotary)
        seen = cupyattn.attention(q, k, qkv[:, :, H + G :], causal=True, **options)
        y = cupyattn.linear(seen.reshape(1, len(tokens), H * D), w["mix"], residual=x)
        inner = cupyattn.linear(cupyattn.rms_norm(y), w["gate_up"], activation="swiglu")
        x = cupyattn.linear(inner, w["down"], residual=y)
    return cupyattn.linear(x[0], on_host(names["head"]))
