"""The smallest language model: a row of logits for each token, on public functions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cupyattn
from cupyattn.models.training.batches import Batch, Packing, Sample
from cupyattn.models.training.optimizer import LossScale, Schedule
from cupyattn.models.training.trainer import Trainer

TOKENS, STEPS = 7, 14


class Bigram:
    """Logits of the next token are ``table[token] + bias``, with dropout if there is any.

    `half` has the gradients of the logits pass through float16, where a large loss scale overflows.
    """

    def __init__(
        self, vocabulary: int, *, dropout: float = 0.0, half: bool = False, put: Any = np.asarray
    ) -> None:
        rng = np.random.default_rng(0)
        table = 0.1 * rng.standard_normal((vocabulary, vocabulary), dtype=np.float32)
        self.arrays = {"bias": put(np.zeros(vocabulary, np.float32)), "table": put(table)}
        self.dropout = dropout
        self.half = half
        self.updates = 0

    def require(self, samples: Sequence[Sample], /) -> None:
        """Its tests make samples of its own tokens."""

    def gradients(
        self, batch: Batch, into: dict[str, Any], /, *, num_labels: int, loss_scale: float,
        seed: int, accumulate: bool,
    ) -> Any:  # fmt: skip
        logits = cupyattn.embedding(self.arrays["table"], batch.ids) + self.arrays["bias"]
        logits = cupyattn.dropout(logits, self.dropout, seed)
        loss, lse = cupyattn.cross_entropy(
            logits, batch.labels, reduction="sum", return_lse=True
        )  # fmt: skip
        dloss = (0 * loss + np.float32(loss_scale / num_labels)).reshape(loss.shape)
        dlogits = cupyattn.cross_entropy_backward(
            dloss.astype(np.float32), logits, batch.labels, lse, reduction="sum"
        )
        if self.half:
            with np.errstate(over="ignore"):
                dlogits = dlogits.astype(np.float16).astype(np.float32)
        dlogits = cupyattn.dropout_backward(dlogits, self.dropout, seed).dx
        dtable = into["table"] if accumulate else None
        found = cupyattn.embedding_backward(
            dlogits, self.arrays["table"], batch.ids, grads=dtable, accumulate=accumulate
        )
        if not accumulate:
            into["table"][...] = found
            into["bias"][...] = 0
        with np.errstate(invalid="ignore"):
            into["bias"][...] += dlogits.sum(axis=0)
        return loss / np.float32(num_labels)

    def updated(self) -> None:
        self.updates += 1

    def identity(self) -> dict[str, Any]:
        return {"dropout": self.dropout}


def counting(tokens: int, *, samples: int) -> list[Sample]:
    """Return texts in which each token is followed by the next number."""
    rng = np.random.default_rng(0)
    made = []
    for length in rng.integers(2, 12, samples).tolist():
        first = int(rng.integers(tokens))
        ids = [(first + i) % tokens for i in range(length)]
        made.append(Sample.of(ids, [True] * length))
    return made


def trained(samples=30, *, vocabulary=TOKENS, seed=0, lr=0.1, loss_scale=None, **options):
    """Everything that has a state: dropout, a loss scale that overflows and grows, two batches."""
    packing = Packing(counting(TOKENS, samples=samples), batch_tokens=24)
    return Trainer(
        Bigram(vocabulary, dropout=0.2, half=True),
        packing,
        schedule=Schedule("cosine", lr, STEPS, warmup=2),
        accumulate=2,
        loss_scale=loss_scale or LossScale(2.0**22, good_steps=2),
        seed=seed,
        **options,
    )
