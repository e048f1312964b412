"""From text to token ids and back, with the tokenizers in the files of models."""

from cupyattn.models.tokenizer.from_files import (
    require_known_tokenizer,
    tokenizer_of_folder,
    tokenizer_of_gguf,
    write_tokenizer,
)
from cupyattn.models.tokenizer.text import Tokenizer

__all__ = [
    "Tokenizer",
    "require_known_tokenizer",
    "tokenizer_of_folder",
    "tokenizer_of_gguf",
    "write_tokenizer",
]
