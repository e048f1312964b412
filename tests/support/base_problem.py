"""One attention problem, and every option of attention in a form that makes a difference to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.strategies import AttentionProblem

from cupyattn import ScoreMod

B, SQ, SK, H, G, D, DV = 2, 5, 7, 4, 2, 8, 6
BASE = AttentionProblem(B=B, Sq=SQ, Sk=SK, H=H, G=G, D=D, Dv=DV)
ANGLES = np.outer(np.arange(20), [1.0, 0.3]).astype(np.float32)
POSITIONS = np.arange(SQ)[:, None] + SK - SQ
EVERY_OPTION: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "softmax_scale": {"softmax_scale": 0.9},
    "window_size": {"window_size": (2, 1)},
    "q_offset": {"q_offset": 1, "window_size": (3, None)},
    "q_offset array": {"q_offset": np.array([0, 3]), "window_size": (3, None)},
    "seqused_k": {"seqused_k": np.array([6, SQ])},
    "mask": {"mask": BASE.normal("mask", (H, SQ, SK)) > -0.5},
    "bias": {"bias": BASE.normal("bias", (B, 1, SQ, SK))},
    "alibi_slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": BASE.normal("sinks", (H,))},
    "dropout_p": {"dropout_p": 0.3, "seed": 5},
    "rotary": {"rotary": (np.cos(ANGLES), np.sin(ANGLES))},
    "score_mod": {
        "score_mod": ScoreMod(
            "1.5f * score + turn[h] * (q_idx - k_idx)",
            python=(
                lambda score, b, h, i, j, turn: 1.5 * score + turn[h] * (i - j),
                lambda score, grad, b, h, i, j, turn: 1.5 * grad,
            ),
            turn=np.array([0.5, -0.25, 0.125, 0.5], np.float32),
        )
    },
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + h + b) % 4 != 0},
}
