"""Methods of a model that generate: each call makes a generator with a cache of the right size."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cupyattn.distributed import Group
from cupyattn.models.config import Config
from cupyattn.models.generation.generator import MAX_BATCH, Generator
from cupyattn.models.generation.options import (
    MOST_SEQUENCES,
    Prompt,
    as_count,
    as_prompts,
    require_positions,
)
from cupyattn.runtime.annotations import Keywords


class Generates:
    """The part of `Model` that generates."""

    config: Config
    weights: Any
    group: Group | None
    xp: ModuleType
    dtype: str
    tokenizer: Any

    def generate(
        self,
        prompts: object,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: object = (),
        n: int = 1,
        **cache: object,
    ) -> list[Any]:
        """Continue prompts, as many sequences at a time as there is room for.

        Parameters
        ----------
        prompts : str, list of int, or list of those
            Text or token ids to continue, of any lengths; an integer array is ids as well.
        max_new_tokens : int
            The most tokens to add. A sample ends earlier with a token of ``config.eos_ids``; if
            its prompt is a string, also with one of ``tokenizer.end_ids``.
        temperature : float
            Divides the logits before a token is drawn; 0 takes the largest.
        top_k, top_p, min_p, repetition_penalty : optional
            Options of `cupyattn.sample`.
        seed : int, optional
            The draws depend only on it and on each token's position, not on the other prompts of a
            batch. Sample s of a prompt has seed + s. By default each prompt has a random seed.
        stop : str, int, or list of those
            Strings and token ids that end a sample. The string is not part of the text.
        n : int
            How many samples to draw for each prompt; they share its keys and values.
        **cache
            Options of `Generator`: num_blocks, block_size, cache_dtype, max_batch, max_tokens,
            preempt, num_host_blocks, lookup, captured. By default there are blocks for all running
            sequences, or as many as 90 % of the free memory holds; other sequences wait.

        Returns
        -------
        list
            The new text for each prompt that is a string, otherwise a list of its new token ids,
            including the one that ended it; with n > 1 a list of n of those.

        Raises
        ------
        TypeError
            If a prompt is neither text nor ids, or an option has the wrong type.
        ValueError
            If a prompt is empty or has an id beyond the vocabulary, prompt and new tokens exceed
            ``config.max_positions``, an option is out of range, text is given to a model without a
            tokenizer, or the ranks of a model call with different arguments. Nothing is computed.
        MemoryError
            If there is no room for the longest sequence alone.

        Notes
        -----
        Each call makes a `Generator` with its own cache. For many calls keep a `Generator`: then
        common beginnings of prompts are computed once, and steps are captured once.

        On a GPU a step of decoding is one CUDA graph for each size of the batch, which determines
        the order of its sums. If two tokens are equally likely within rounding, another one may be
        chosen in another batch.

        Examples
        --------
        >>> import numpy as np
        >>> from cupyattn import models
        >>> tiny = models.PRESETS["gpt2"]._replace(
        ...     num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
        ...     intermediate_size=32, vocab_size=50,
        ... )
        >>> model = models.random(tiny, dtype="float32", xp=np)
        >>> first, second = model.generate([[1, 2, 3], [4]], max_new_tokens=5)
        >>> len(first), model.generate([4], max_new_tokens=5) == [second]
        (5, True)
        """
        read, generator = self._prepared(prompts, max_new_tokens, n, cache)
        return generator.generate(
            read, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, stop=stop, n=n,
        )  # fmt: skip

    def stream(
        self,
        prompt: object,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: object = (),
        **cache: object,
    ) -> Iterator[Any]:
        """Continue one prompt, and yield the result piece by piece.

        Parameters
        ----------
        prompt : str, or list of int
            Text or token ids.
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, **cache
            As of `generate`.

        Returns
        -------
        iterator
            Pieces of text, which never split a character, or token ids for a prompt of ids. Joined
            they are the result of `generate`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `generate`, when it is called.
        """
        read, generator = self._prepared(prompt, max_new_tokens, 1, cache)
        return generator.stream(
            read, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, stop=stop,
        )  # fmt: skip

    def _prepared(
        self, prompts: object, max_new_tokens: object, n: object, cache: Keywords
    ) -> tuple[list[Prompt], Generator]:
        """Read the prompts, and make a generator with room for them."""
        new, n = as_count("max_new_tokens", max_new_tokens, 1), as_count("n", n, 1, MOST_SEQUENCES)
        read = as_prompts(prompts, self)
        for prompt in read:
            require_positions(len(prompt.ids), new, self.config.max_positions)
        lengths = [len(prompt.ids) + new for prompt in read for _ in range(n)]
        return read, Generator(
            self, **{"max_batch": max(MAX_BATCH, n), "lengths": lengths, **cache}
        )
