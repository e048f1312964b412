"""Text from a model: sampling, stops, streams, a paged cache, captured steps."""

from cupyattn.models.generation.continuations import Generation
from cupyattn.models.generation.generator import Generator
from cupyattn.models.generation.methods import Generates
from cupyattn.models.generation.options import Prompt

__all__ = ["Generates", "Generation", "Generator", "Prompt"]
