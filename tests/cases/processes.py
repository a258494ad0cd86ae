"""Starts several JAX processes for a test, and ends them whatever happens.

Output goes to files, since a full pipe would stop a process; each has a group of its own, which is killed at the end;
and each ends itself, with all its stacks, before the test gives up on it.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time

from anybatch import distributed
from anybatch.cli import launch

PRELUDE = """\
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later({timeout}, exit=True)
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from anybatch import distributed
"""


@dataclasses.dataclass
class Ended:
    """How a process ended: its exit status, negative for a signal, and when, in seconds since all were started."""

    status: int
    output: str
    seconds: float


def run(body, folder, *, count=2, only=None, devices=4, timeout=60.0, environment=None):
    """Runs a text of Python in `count` processes, or in those of them that `only` names, and waits for all to end.

    Args:
      body: what each of them runs. The processes find each other by `distributed.initialize()`.
      folder: for the script and its output.
      count: how many processes each of them expects.
      only: the indices that are started.
      devices: how many each has.
      timeout: the seconds after which those that still run are killed, and the test fails.
      environment: index -> variables, instead of those that `anybatch launch` sets.
    """
    script = folder / "script.py"
    script.write_text(PRELUDE.format(timeout=timeout) + textwrap.dedent(body))
    address = f"127.0.0.1:{launch.free_port()}"
    indices = list(range(count) if only is None else only)
    started, outputs, ended = time.monotonic(), [folder / f"output.{index}" for index in indices], {}
    children = []
    try:
        for index, output in zip(indices, outputs, strict=True):
            found = environment(index) if environment else _launched(address, count, index)
            children.append(_start(script, output, devices, found))
        while len(ended) < len(children) and time.monotonic() - started < timeout + 5:
            for index, child in enumerate(children):
                if index not in ended and child.poll() is not None:
                    ended[index] = time.monotonic() - started
            time.sleep(0.02)
    finally:
        for child in children:
            end(child)
    texts = [output.read_text(errors="replace") for output in outputs]
    assert len(ended) == len(children), f"still running after {timeout} s:\n" + "\n".join(texts)
    return [Ended(child.returncode, texts[index], ended[index]) for index, child in enumerate(children)]


def end(child):
    """Ends a process that leads its group, and the group."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _launched(address, count, index):
    return {
        distributed.COORDINATOR: address,
        distributed.NUM_PROCESSES: str(count),
        distributed.PROCESS_ID: str(index),
    }


def _start(script, output, devices, found):
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(script)],
            env=inherited | own | found,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
