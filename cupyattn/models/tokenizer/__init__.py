"""From text to token ids and back, as a model's files say, by the package tokenizers."""

from cupyattn.models.tokenizer.from_files import tokenizer_of_folder, tokenizer_of_gguf
from cupyattn.models.tokenizer.text import Tokenizer

__all__ = ["Tokenizer", "tokenizer_of_folder", "tokenizer_of_gguf"]
