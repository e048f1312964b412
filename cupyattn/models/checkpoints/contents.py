"""The contents of a checkpoint's files, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cupyattn.models.checkpoints.names import Naming
from cupyattn.models.checkpoints.tensors import AnyTensor
from cupyattn.models.config import Config
from cupyattn.runtime.errors import error


class Checkpoint(NamedTuple):
    """A model in files: its config, and its tensors by the names that they have there.

    Attributes
    ----------
    where : str
        The file or folder, for errors.
    config : Config
        Its numbers.
    naming : Naming
        What its weights are called.
    tensors : dict from str to Tensor or QuantisedTensor
        All that the files hold.
    read_tokenizer : callable
        Returns its tokenizer, or None.
    """

    where: str
    config: Config
    naming: Naming
    tensors: dict[str, AnyTensor]
    read_tokenizer: Callable[[], Any]


def damaged(where: str, what: str) -> ValueError:
    """Make the error of a file that is not what it should be."""
    return error(
        ValueError,
        f"{where}: {what}",
        "a model is read from whole files as they were published",
        "download the file again, or convert the model again",
    )
