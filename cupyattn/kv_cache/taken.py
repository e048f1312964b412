"""The tokens that a step has drawn, taken as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from cupyattn.kv_cache.requests import Request, Run, Work


class Taken:
    """The end of a step, first made ready, then settled.

    Whatever cuts a step short, a MemoryError or Ctrl-C: until it is `ready` nothing of it can be
    seen, and forks are all that there is to give back. Then it only has to be settled: that says
    what things are, not how they change, so that it may be begun again.

    Parameters
    ----------
    runs : iterable of Run
        All that the scheduler knows when the step begins.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)
        self.ready = False
        self.running: list[Run] = []
        """Those that go on, the earliest first."""
        self._forks: list[Run] = []
        self._ended: list[Run] = []
        self._grown: list[tuple[list[int], int, list[int]]] = []  # a list, and what is behind where
        self._going: list[tuple[Run, tuple[int, ...], int]] = []  # its samples, what is written
        self._finished_samples: list[tuple[Request, int]] = []

    def prepare(
        self, running: Items[Run], batch: Items[Work], sampled: Items[list[list[int]]]
    ) -> None:
        """Make it ready: samples end, or go on, each with a sequence of its own."""
        for run, work, drawn in zip(running, batch, sampled, strict=True):
            if work.samples:
                self._take(run, drawn)
            else:
                self._go_on(run, run.samples)
        self.ready = True

    def _take(self, run: Run, drawn: list[list[int]]) -> None:
        request, going = run.request, []
        for sample, tokens in zip(run.samples, drawn, strict=True):
            output = request.outputs[sample]
            taken, ends = request.until_end(len(output), tokens)
            self._grown.append((output, len(output), taken))
            if ends:
                self._finished_samples.append((request, sample))
            else:
                going.append((sample, taken))
        if not going:
            self._ended.append(run)
            return
        (first, tokens), *others = going
        self._go_on(run, (first,))
        for sample, of_sample in others:
            fork = Run(request, (sample,), [*run.tokens, *of_sample])
            self._forks.append(fork)
            self.running.append(fork)
            assert run.sequence is not None
            fork.sequence = run.sequence.fork()
            fork.written = len(fork.sequence)
        self._grown.append((run.tokens, len(run.tokens), tokens))

    def _go_on(self, run: Run, samples: tuple[int, ...]) -> None:
        assert run.sequence is not None
        self.running.append(run)
        self._going.append((run, samples, len(run.sequence)))

    def settle(self) -> list[Request]:
        """Make all of it so; return the requests that have finished with it."""
        for tokens, length, more in self._grown:
            tokens[length:] = more
        for run, samples, written in self._going:
            run.samples, run.written = samples, written
        for request, sample in self._finished_samples:
            request.end(sample)
        for run in self._ended:
            run.drop()
        return [request for request in dict.fromkeys(run.request for run in self._ended)
                if request.finished]  # fmt: skip

    def give_back(self) -> None:
        """Give back the forks of one that was not ready."""
        for fork in self._forks:
            fork.drop()


def going(runs: Iterable[Run]) -> list[Run]:
    """Let go of the samples that were cancelled; return the runs that have others."""
    known = list(runs)
    for run in known:
        run.leave()
    return [run for run in known if run.samples]
