"""Asks a learner's code ahead of time: two processes of it are at work while their answers are judged in order.

Tracing and compiling is what a check takes its time for, and programs of different shapes are compiled apart. Each
goes to one process, so that what it has compiled is there when it is asked again.
"""

import concurrent.futures
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.learn.check import Arguments, Check
from anybatch.learn.runner.submissions import Submission


def processes_of(check: Check) -> tuple[int, ...]:
    """The numbers of devices that the processes of a check have: one process for each, or two where there is one."""
    counts = sorted({*check.devices, *([check.collectives.devices] if check.collectives else [])})
    return tuple(counts * 2 if len(counts) == 1 and check.is_compiled and (os.cpu_count() or 1) > 1 else counts)


class Asking:
    """Questions to the processes of one submission.

    Args:
      check: of which function.
      submissions: the number of devices of each process, and the process.
    """

    def __init__(self, check: Check, submissions: Sequence[tuple[int, Submission]]) -> None:
        self._check = check
        self._submissions = submissions
        self._pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in submissions]
        self._loading = [
            pool.submit(_loaded, submission) for pool, (_, submission) in zip(self._pools, submissions, strict=True)
        ]
        self._homes: dict[Any, int] = {}  # of a kind of arguments, the process that has it
        self._asked: dict[Any, concurrent.futures.Future[dict[str, Any]]] = {}
        self._kept: list[Arguments] = []  # so that nothing else gets their identity

    def loaded(self) -> Iterator[dict[str, Any]]:
        """What came of loading the file, for each process; waits for it."""
        for loading in self._loading:
            yield loading.result()

    def begin(self, count: int, args: Arguments, *want: str) -> None:
        """Asks, without waiting: the answer will be wanted."""
        key = (count, id(args), want)
        if key in self._asked:
            return
        self._kept.append(args)
        self._asked[key] = self._submit(count, args, want)

    def answer(self, count: int, args: Arguments, *want: str) -> dict[str, Any]:
        """The answer, which may have been asked for already; waits for it, and raises what `Submission.ask` raises."""
        self.begin(count, args, *want)
        return self._asked[count, id(args), want].result()

    def respond(self, count: int, args: Arguments, more: Mapping[str, Any]) -> dict[str, Any]:
        """What becomes of the answer if operations are held still; arguments of one kind are asked for once."""
        leaves = zip(jax.tree.leaves(args), jax.tree.leaves(more["others"]), strict=True)
        changed = tuple(np.not_equal(one, other).tobytes() for one, other in leaves)
        key = (count, kind_of(args), repr(more["selects"]), more["distorts"], changed)
        if key not in self._asked:
            self._asked[key] = self._submit(count, args, ("response",), more)
        return self._asked[key].result()

    def _submit(
        self, count: int, args: Arguments, want: tuple[str, ...], more: Mapping[str, Any] | None = None
    ) -> concurrent.futures.Future[dict[str, Any]]:
        home = self._home(count, args)
        request = call(self._check, args, *want) | dict(more or {})
        return self._pools[home].submit(self._submissions[home][1].ask, request)

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for _, submission in self._submissions:
            submission.end()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def _home(self, count: int, args: Arguments) -> int:
        kind = (count, kind_of(args)) if self._check.is_compiled else count
        if kind not in self._homes:
            taken = Counter(self._homes.values())
            able = [index for index, (devices, _) in enumerate(self._submissions) if devices == count]
            self._homes[kind] = min(able, key=lambda index: taken[index])
        return self._homes[kind]


def _loaded(submission: Submission) -> dict[str, Any]:
    return submission.loaded


def call(check: Check, args: Arguments, *want: str) -> dict[str, Any]:
    """The request for a call of the function of a check."""
    return {"do": "call", "function": check.function, "args": args, "want": want, "compiled": check.is_compiled}


def kind_of(args: Arguments) -> Any:
    """Arguments of one kind share a program."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(
        (leaf.shape, leaf.dtype.name) if isinstance(leaf, (np.ndarray, np.generic)) else (type(leaf), repr(leaf))
        for leaf in leaves
    )
