"""The job behind `anybatch demo` and `anybatch train`: trains a GPT on a text, within a memory budget.

`Job.run` goes through the stages that it prints: the loss is read, the gradient planned and verified, the model
trained, and a report written. A `RunFolder` decides whether a run can start or continue in a folder:

    checkpoints/        the checkpoints of `anybatch.fit`
    log.csv             the log of `anybatch.fit`
    settings.json       the options of the run, and a hash of its text
    vocabulary.json     the characters that the model knows
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.display import visible
from anybatch.call.files import read_regular, write_atomically
from anybatch.call.memory import readable
from anybatch.demo.config import GPU_DEMO, SMALL_DEMO, RunConfig, as_toml
from anybatch.demo.gpt import GPT, count
from anybatch.demo.text import Corpus, Vocabulary, Windows, read_text
from anybatch.errors import InputError, NothingFitsError
from anybatch.jaxprs import versions
from anybatch.planning.plan import Plan
from anybatch.reading.read import read
from anybatch.report import Report
from anybatch.report.page import check_path
from anybatch.training.checkpoint_folder import CheckpointFolder
from anybatch.training.loop import Fitted, fit
from anybatch.training.step import train_step
from anybatch.verification.verify import Verification, verify

# Options that define the model. A saved model cannot continue if one of them has changed.
OF_THE_MODEL = ("level", "layers", "heads", "width", "context", "dtype")

# Options that do not change what the model learns. `text` is here because the text is compared by its hash: its file
# may have moved.
WITHOUT_EFFECT = {"text", "out", "report", "evaluate_every", "checkpoint_every"}
WITHOUT_EFFECT |= {"verify", "prompt", "sample", "temperature"}

# The largest file to read back. A vocabulary of all Unicode characters is smaller.
MOST_BYTES = 2**26

# The files that a run writes into its folder, besides its checkpoints.
OWN_FILES = ("log.csv", "vocabulary.json", "settings.json")


class RunFolder:
    """The folder of a run. Creating this object checks that a run can start there, or continue if `resume`.

    It deletes nothing. It is an InputError if the folder is not writable, or has other files or another run in it.
    """

    def __init__(self, config: RunConfig, text: str, vocabulary: Vocabulary, *, name: str, resume: bool = True) -> None:
        self.config, self.vocabulary, self.name = config, vocabulary, name
        self.path = expand_user(config.out)
        self._checkpoints = CheckpointFolder(self.path / "checkpoints")
        self._text_hash = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._check_writable()
        self._stored = _read_object(self.path / "settings.json")
        saved = self.steps_saved()
        self.continues = saved is not None
        if saved is None:
            self._check_no_other_files()
        elif not resume:
            raise InputError(
                "A new run needs a folder without a run",
                given=f"{self.path}, with a run of {saved} steps",
                remedy=f"Leave out --no-resume to continue that run. Or name another folder; or: rm -r '{self.path}'",
            )
        else:
            self._check_same_run()

    def steps_saved(self) -> int | None:
        """The step of the newest checkpoint in the folder, or None."""
        return max(self._checkpoints.steps(), default=None)

    def changes(self) -> list[str]:
        """For a run that continues: a sentence for each option that has changed since it was saved."""
        if not self.continues:
            return []
        now = dataclasses.asdict(self.config)
        return [
            f"It continues with {name} = {as_toml(now[name])}, was {as_toml(self._stored[name])}."
            for name in now
            if name not in WITHOUT_EFFECT and name in self._stored and self._stored[name] != now[name]
        ]

    def write_settings(self) -> None:
        """Writes `vocabulary.json`, without which the parameters cannot be used, and `settings.json`."""
        vocabulary = {"level": self.config.level, "characters": self.vocabulary.characters}
        settings = {"text_sha256": self._text_hash, **dataclasses.asdict(self.config)}
        for name, content in (("vocabulary", json.dumps(vocabulary)), ("settings", json.dumps(settings, indent=2))):
            must = "The folder of a run must be writable"
            write_atomically(
                self.path / f"{name}.json", f"{content}\n".encode(), must=must, given=f"out = {str(self.path)!r}"
            )

    def _check_writable(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InputError(
                "The folder of a run must be writable",
                given=f"out = {str(self.path)!r} ({error.strerror})",
                remedy='Name another folder, e.g. out = "runs/first".',
            ) from None

    def _check_no_other_files(self) -> None:
        """Without a checkpoint there is no run to continue, and a new one would overwrite files with the same names."""
        self._checkpoints.check_ours()
        names = ["log.csv"] if "text_sha256" in self._stored else OWN_FILES
        found = [name for name in names if (self.path / name).exists()]
        if found:
            raise InputError(
                "The folder of a run must be new, or have a run in it",
                given=f"{self.path} with {', '.join(found)}, and without a checkpoint",
                remedy='Name another folder, e.g. out = "runs/first", or move these files.',
            )

    def _check_same_run(self) -> None:
        """Raises unless the run in the folder has the same model and the same text."""
        now, before = dataclasses.asdict(self.config), self._stored
        ways_out = f"or use another folder, e.g. out = \"runs/second\"; or start again: rm -r '{self.path}'"
        for name in (*OF_THE_MODEL, "dropout"):
            same = now[name] == before.get(name, now[name])
            if name == "dropout" and name in before:
                same = bool(now[name]) == bool(before[name])  # a run without dropout has saved no PRNG key
            if not same:
                raise InputError(
                    "A run that continues must have the same model as before",
                    given=f"{name} = {as_toml(now[name])}, and {name} = {as_toml(before[name])} in {self.path}",
                    remedy=f"Continue with {name} = {as_toml(before[name])}, {ways_out}",
                )
        if before.get("text_sha256", self._text_hash) != self._text_hash:
            named = f" (text = {as_toml(before['text'])})" if before.get("text") else ""
            raise InputError(
                "A run that continues must have the same text as before",
                given=f"{self.name}, and another text in {self.path}",
                remedy=f"Name the text of that run{named}, {ways_out}",
            )


def expand_user(path: str) -> pathlib.Path:
    """A path with `~` replaced by the home folder. `~name` stays as it is if there is no such user."""
    return pathlib.Path(os.path.expanduser(path))


def check_report(path: pathlib.Path, folder: pathlib.Path, text: str) -> None:
    """Raises an InputError unless the report can be written without overwriting the text, or any other file."""
    report, home = _comparable(path), _comparable(folder)
    is_text = bool(text) and report == _comparable(expand_user(text))
    if is_text or report in {home / name for name in OWN_FILES} or report.is_relative_to(home / "checkpoints"):
        raise InputError(
            "The report must not overwrite the text or a file of the run",
            given=f"report = {str(path)!r}, which {'is the text' if is_text else 'the run itself writes'}",
            remedy='For example: report = "anybatch-report.html"',
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            "The report must be a file in a folder that exists and is writable",
            given=f"report = {str(path)!r}",
            remedy=f'For example report = "anybatch-report.html", or first: mkdir -p "{path.parent}"',
        )
    check_path(path, given=f"report = {str(path)!r}")


def _comparable(path: pathlib.Path) -> pathlib.Path:
    """A path with links followed and in lower case, since some file systems ignore case."""
    return pathlib.Path(os.path.realpath(path).casefold())


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file cannot be read or has something else in it."""
    try:
        found = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# The largest number of validation windows in an evaluation.
MOST_VALIDATION_WINDOWS = 64

# How many windows are verified in float64, and in microbatches of how many. The same windows also run as a full batch.
VERIFIED, VERIFIED_MICROBATCH = 8, 4

# If the last validation loss is this many times the lowest one, the model is memorising the text.
MEMORISING = 1.01


def run_demo(*, gpu_size: bool = False, resume: bool = True, **changes: Any) -> int:
    """Runs `anybatch demo`, and returns the exit code. A complete demo in the folder is shown again.

    Args:
      gpu_size: True for the model that needs an accelerator.
      resume: as for `run`.
      **changes: options of the demo to change. None leaves an option as it is.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(GPU_DEMO if gpu_size else SMALL_DEMO, **given)
    words = ["anybatch demo", *(["--gpu-size"] if gpu_size else [])]
    words += [f"--{name} {shlex.quote(str(value))}" for name, value in given.items()]
    return run(config, command=" ".join(words), resume=resume)


def run(config: RunConfig, *, command: str, resume: bool = True) -> int:
    """Runs a job, prints its stages, and returns the exit code: 0, 130 after Ctrl-C, or 143 after SIGTERM.

    Args:
      config: the options of the run.
      command: the shell command that continues the run, shown when it is stopped.
      resume: True to continue a run that is in the folder. If False, the folder must have none.
    """
    from rich.console import Console

    job, console = Job(config, resume=resume), Console()
    try:
        return job.run(command, console)
    except KeyboardInterrupt:
        saved = job.folder.steps_saved()
        where = "before the first step" if saved is None else f"the last checkpoint is of step {saved}"
        console.print(f"\nStopped: {where}. To continue: {command}", highlight=False, soft_wrap=True)
        return 130


class Job:
    """One training run: its text, model and folder. Creating it checks all of them."""

    def __init__(self, config: RunConfig, *, resume: bool = True) -> None:
        self.config = config
        for package in ("optax", "orbax.checkpoint", "rich", "jinja2"):
            importlib.import_module(package)  # one that is missing is reported before any work is done
        name = config.text or "the fables that come with anybatch"
        text = read_text(config.text, config.level)
        self.corpus = Corpus.of(
            text, level=config.level, context=config.context, validation=config.validation, name=name
        )
        self.name = name
        self.prompt = self.corpus.vocabulary.encode(config.prompt) if config.prompt else self.corpus.training[:8]
        # The folder comes first, since the report may be a file in it.
        self.folder = RunFolder(config, text, self.corpus.vocabulary, name=name, resume=resume)
        self.report = expand_user(config.report) if config.report else None
        if self.report is not None:
            check_report(self.report, self.folder.path, config.text)
        self.model = GPT(
            vocabulary=self.corpus.vocabulary.size,
            context=config.context,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            dropout=config.dropout,
            dtype=config.dtype,
        )

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
        """The mean cross-entropy of the next token."""
        return self.model.loss(params, batch["tokens"], key)

    def optimizer(self) -> Any:
        """AdamW with gradient clipping, and a learning rate with a linear warmup and a cosine decay."""
        import optax

        config = self.config
        highest, warmup = config.learning_rate, min(config.warmup, config.steps - 1)
        schedule = optax.warmup_cosine_decay_schedule(
            highest / (warmup + 1), highest, warmup, config.steps, end_value=highest / 10
        )

        def decays(params: Any) -> Any:  # the scales of the norms do not decay
            return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

        adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=decays)
        return optax.chain(optax.clip_by_global_norm(config.clip), adamw)

    def evaluation(self, batch_size: int) -> Callable[[Any], dict[str, jax.Array]] | None:
        """A function that computes the validation loss of a state, `batch_size` windows at a time.

        None if there is no validation text.
        """
        if not len(self.corpus.validation):
            return None
        windows = jnp.asarray(self.corpus.validation_windows(self.config.context, MOST_VALIDATION_WINDOWS))

        @jax.jit
        def evaluate(params: Any) -> jax.Array:
            one = functools.partial(self.model.loss, params)
            return jnp.mean(jax.lax.map(lambda row: one(row[None]), windows, batch_size=min(batch_size, len(windows))))

        return lambda state: {"loss": evaluate(state.params)}

    def sample(self, params: Any) -> str:
        """A text that the model writes."""
        config = self.config
        ids = self.model.sample(
            params,
            jnp.asarray(self.prompt, jnp.int32),
            jax.random.key(config.seed + 1),
            length=config.sample,
            temperature=config.temperature,
        )
        return self.corpus.vocabulary.decode(ids)

    def run(self, command: str, console: Any) -> int:
        """Trains, prints and writes the report. Returns the exit code."""
        start = time.perf_counter()
        printer, config = _Printer(console), self.config
        seed, dropout_key = jax.random.split(jax.random.key(config.seed))
        params = self.model.init(seed)
        key = dropout_key if config.dropout else None
        windows = Windows(
            self.corpus.training,
            context=config.context,
            batch_size=config.batch,
            seed=config.seed,
            # `fit` opens the windows once it has the folder to itself and has accepted its checkpoint, if there is
            # one. If it refuses, nothing has been written.
            opened=self.folder.write_settings,
        )
        first = windows.batch(0)
        keys = () if key is None else (key,)
        self._introduce(printer, params)

        printer.heading("The loss")
        reading = read(self.loss, params, first, *keys)
        printer.text(reading)

        printer.heading("The plan")
        step = train_step(
            self.loss,
            self.optimizer(),
            noise_scale=True,
            tokens=lambda batch: batch["tokens"][:, 1:].size,
            memory=config.memory or None,
            remat=config.remat or None,
        )
        state = step.init(params, key)
        plan = _plan(printer, step, state, first)
        verification = self._verify(printer, params, first, *keys) if config.verify else None

        samples = []
        if config.sample:
            samples.append(("Before training", self.sample(params)))
            printer.section(*samples[-1])

        printer.heading("Training")
        del params  # so that training has their memory
        result = self._fit(step, state, windows, plan)
        if result.stopped_by is not None and result.steps < config.steps:
            printer.text(f"To continue: {command}")
            return result.exit_code

        if config.sample:
            samples.append((f"After {result.steps} steps", self.sample(result.state.params)))
            printer.section(*samples[-1])

        printer.heading("The result")
        notes = _loss_notes(result)
        for note in [*notes, *_noise_notes(result, config.batch)]:
            printer.text(note)
        if self.report is not None:
            report = Report(
                title=f"A GPT learns {self.name}",
                history=result.history,
                plan=plan,
                reading=reading,
                verification=verification,
                noise=result.noise,
                samples=samples,
                settings={"parameters": f"{count(result.state.params):,}", **dataclasses.asdict(config)},
                notes=notes,
            )
            printer.text(f"The report: {report.write(self.report)}")
        printer.text(f"Checkpoints and log: {self.folder.path}. Total time: {time.perf_counter() - start:.0f} s.")
        return result.exit_code

    def _introduce(self, printer: "_Printer", params: Any) -> None:
        config, corpus, device = self.config, self.corpus, jax.local_devices()[0]
        tokens = len(corpus.training) + len(corpus.validation)
        title = f"A GPT of {count(params):,} parameters learns {self.name}: {tokens:,} {config.level}"
        printer.text(title, "bold")
        printer.text(
            f"Each step takes the exact gradient of {config.batch} windows of {config.context} {config.level}, "
            f"within {config.memory or 'the free memory'}, "
            f"on {device.device_kind}, with JAX {versions.versions()[0]}."
        )
        for change in self.folder.changes():
            printer.text(change)

    def _verify(self, printer: "_Printer", params: Any, batch: Any, *keys: jax.Array) -> Verification:
        printer.heading("The gradient")
        examples = min(VERIFIED, self.config.batch)
        # `verify` commits arrays to their device. If the parameters are committed already, nothing has to be compiled a
        # second time for committed arrays.
        params = jax.device_put(params, jax.local_devices()[0])
        with printer.busy("Verifying"):
            verification = verify(
                self.loss, params, batch, *keys, sample=examples, microbatch_sizes=min(VERIFIED_MICROBATCH, examples)
            )
        printer.text(verification)
        return verification.raise_if_different()

    def _fit(self, step: Any, state: Any, windows: Windows, plan: Plan) -> Fitted:
        config, evaluate = self.config, self.evaluation(plan.microbatch_size or 1)
        return fit(
            step,
            state,
            windows,
            steps=config.steps,
            evaluate=evaluate,
            evaluate_every=config.evaluate_every if evaluate else None,
            log=self.folder.path / "log.csv",
            checkpoints=self.folder.path / "checkpoints",
            checkpoint_every=config.checkpoint_every,
            resume=self.folder.continues,
        )


class _Printer:
    """Prints to a rich console. Text is printed as it is: no markup, and control characters as escapes."""

    def __init__(self, console: Any) -> None:
        self._console = console

    def text(self, text: Any, style: str | None = None) -> None:
        self._console.print(visible(str(text)), style=style, markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.text(f"\n{text}", "bold cyan")

    def section(self, heading: str, text: str) -> None:
        self.heading(heading)
        self.text(text)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Shows a spinner with a text, if stderr is a terminal."""
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield


def _plan(printer: _Printer, step: Any, state: Any, batch: Any) -> Plan:
    plan = step.explain(state, batch, timed=False, progress=sys.stderr.isatty())
    if plan.chosen is None:
        raise NothingFitsError(f'{plan}\nIn the options of this run: a larger memory = "...", or remat = "auto".')
    printer.text(plan)
    printer.text(_plan_in_words(plan))
    return plan


def _plan_in_words(plan: Plan) -> str:
    """A sentence that compares the memory of the full batch with the memory of the chosen candidate."""
    full = next((each for each in plan.candidates if each.is_full_batch), None)
    if full is None or full.total is None or plan.chosen is None or plan.chosen.total is None:
        return ""
    if plan.chosen == full or plan.budget is None:
        return f"The full batch of {plan.num_examples} takes {readable(full.total)}, and that fits."
    times = full.total / plan.budget
    many = f"{times:.0f} times" if times >= 1.5 else f"{times:.2f} times"
    return (
        f"The full batch of {plan.num_examples} would take {readable(full.total)}: {many} the budget. In microbatches "
        f"of {plan.chosen.microbatch_size} it takes {readable(plan.chosen.total)}, for the same gradient."
    )


def _loss_notes(result: Fitted) -> list[str]:
    """Sentences about the training loss and the validation loss."""
    losses = [(row["step"], row["loss"]) for row in result.history if row.get("loss") is not None]
    validation = [(row["eval.loss"], row["step"]) for row in result.history if row.get("eval.loss") is not None]
    if not losses:
        return []
    notes = [f"{result.steps} steps in {result.seconds:.0f} s: {_loss_change(losses)}."]
    finite = [each for each in validation if math.isfinite(each[0])]
    if validation and not math.isfinite(validation[-1][0]):
        notes.append("The validation loss is not finite.")
    elif validation:
        last, (lowest, step) = validation[-1][0], min(finite)
        notes.append(f"The validation loss is {last:.2f}.")
        if last > MEMORISING * lowest:
            notes[-1] = (
                f"The validation loss is {last:.2f}, and was {lowest:.2f} after step {step}: since then the model has "
                "been memorising the text, as a large model does with a small text."
            )
    return notes


def _loss_change(losses: list[tuple[int, float]]) -> str:
    """How the training loss changed from the first step to the last, as a clause."""
    if not math.isfinite(losses[-1][1]):
        since = max((place for place, (_, loss) in enumerate(losses, 1) if math.isfinite(loss)), default=0)
        return f"the loss is not finite since step {losses[since][0]}"
    first, last = next(loss for _, loss in losses if math.isfinite(loss)), losses[-1][1]
    if f"{first:.2f}" == f"{last:.2f}":
        return f"the loss did not change, and is {last:.2f}"
    return f"the loss {'fell' if last < first else 'rose'} from {first:.2f} to {last:.2f}"


def _noise_notes(result: Fitted, batch: int) -> list[str]:
    """A sentence about the gradient noise scale, if it was measured."""
    if result.noise is None:
        return []
    noise = result.noise
    if not noise.is_defined:
        return [f"The noise scale is undefined: {noise.why_undefined}."]
    scale = float(noise.value)
    share = batch / (batch + scale)
    return [
        f"The gradient noise scale at the end is {scale:.3g} windows: to first order, a step of {batch} makes "
        f"{share:.0%} of the progress of one without noise."
    ]
