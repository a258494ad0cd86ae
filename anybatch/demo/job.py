"""The folder of a run: what the run was told, whether one may go on there, and what may be cleared away.

The job behind `anybatch demo` and `anybatch train`: a GPT learns a text, in a memory that its batch does not fit.

`anybatch demo`: a GPT learns a few fables, in a small part of the memory that its batch would take.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.files import read_regular, write_atomically
from anybatch.call.memory import readable
from anybatch.demo.config import RunConfig, written
from anybatch.demo.gpt import GPT, count
from anybatch.demo.text import Corpus, Vocabulary, Windows, read_text
from anybatch.errors import InputError, NothingFitsError
from anybatch.jaxprs import versions
from anybatch.planning.plan import Plan
from anybatch.reading.read import read
from anybatch.report import Report
from anybatch.report.figures import visible
from anybatch.report.page import check_path
from anybatch.training.checkpoint_folder import CheckpointFolder
from anybatch.training.loop import Fitted, fit
from anybatch.training.step import train_step
from anybatch.verification.verify import Verification, verify

# With another one of these, what was saved is not of this model.
OF_THE_MODEL = ("level", "layers", "heads", "width", "context", "dtype")

# These do not change what is learned. Another text does, and is told by its sum: its file may have moved.
WITHOUT_EFFECT = {"text", "out", "report", "evaluate_every", "checkpoint_every"}
WITHOUT_EFFECT |= {"verify", "prompt", "sample", "temperature"}

# Of a file that a run wrote, such as a vocabulary of all characters there are.
MOST_BYTES = 2**26

# What a run writes into its folder, beside its checkpoints.
OWN_FILES = ("log.csv", "vocabulary.json", "settings.json")

# In a folder of checkpoints, beside those that are complete and what is hidden.
_LEFTOVER = re.compile(r"\d+\.(replaced|removed|orbax-checkpoint-tmp.*)")


class RunFolder:
    """The folder of a run, checked: it can be written, and what is in it is of the same run, or nothing.

    **Nothing is lost.** To be made, it writes and deletes nothing. What `begin` clears away is a demonstration's.

    Args:
      config: what the run was told.
      text: that it learns.
      vocabulary: of the text.
      name: of the text, for messages.
      resume: whether to go on with a run that is there.
      is_demo: whether it is the demonstration, which replaces one that came to its end, or is not to be gone on with.

    Raises:
      InputError: if the folder cannot be written, or has something else in it.
    """

    def __init__(
        self,
        config: RunConfig,
        text: str,
        vocabulary: Vocabulary,
        *,
        name: str,
        resume: bool = True,
        is_demo: bool = False,
    ) -> None:
        self.config, self.vocabulary, self.name = config, vocabulary, name
        self.path = expanded(config.out)
        self._checkpoints = CheckpointFolder(self.path / "checkpoints")
        self._kind = "demo" if is_demo else "train"
        self._sum = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._check_writable()
        self._stored = _read_object(self.path / "settings.json")
        saved = self.steps_on_disk()
        self.is_replaced = is_demo and saved is not None and (not resume or saved >= config.steps)
        self.goes_on = saved is not None and not self.is_replaced
        if saved is None:
            self._check_nothing_else()
        elif is_demo and self._stored.get("run") != "demo":
            raise InputError(
                "The demo must have a folder of its own",
                given=f"{self.path}, with a run of {saved} steps that is not the demo's",
                remedy="Name another one, e.g. --out anybatch-demo-2",
            )
        elif self.is_replaced:
            self._check_checkpoints_only()
        elif not resume:
            raise InputError(
                "A run that begins anew needs a folder without one",
                given=f"{self.path}, with a run of {saved} steps",
                remedy=f"Leave --no-resume out to go on with it. Or name another folder; or: rm -r '{self.path}'",
            )
        else:
            self._check_same()

    def steps_on_disk(self) -> int | None:
        """The newest step that is saved there, if any."""
        return max(self._checkpoints.steps(), default=None)

    def steps_saved(self) -> int | None:
        """The newest step of this run that is saved, if any."""
        return None if self.is_replaced else self.steps_on_disk()

    def changes(self) -> list[str]:
        """What a run that goes on was told otherwise before."""
        if not self.goes_on:
            return []
        now = dataclasses.asdict(self.config)
        return [
            f"It goes on with {name} = {written(now[name])}, was {written(self._stored[name])}."
            for name in now
            if name not in WITHOUT_EFFECT and name in self._stored and self._stored[name] != now[name]
        ]

    def begin(self) -> None:
        """Right before a run: clears away the demonstration that it replaces, and writes what a new one was told.

        Raises:
          InputError: if another process is at it: what that one was told is not to be replaced.
        """
        if self.is_replaced:
            self._clear()
        if not self.goes_on:
            self._checkpoints.open()
            try:
                self.write_settings()
            finally:
                self._checkpoints.close()

    def write_settings(self) -> None:
        """The vocabulary, without which the parameters would mean nothing, and what the run was told."""
        vocabulary = {"level": self.config.level, "characters": self.vocabulary.characters}
        settings = {"run": self._kind, "text_sha256": self._sum, **dataclasses.asdict(self.config)}
        for name, content in (("vocabulary", json.dumps(vocabulary)), ("settings", json.dumps(settings, indent=2))):
            must = "The folder of a run must be one that can be written"
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
                "The folder of a run must be one that can be written",
                given=f"out = {str(self.path)!r} ({error.strerror})",
                remedy='Name another one, e.g. out = "runs/first".',
            ) from None

    def _check_nothing_else(self) -> None:
        """Without a checkpoint there is no run to go on with: what has the names of one's files is not to be lost."""
        is_ours = self._stored.get("run") in ("demo", "train") and "text_sha256" in self._stored
        names = ["log.csv"] if is_ours else ["log.csv", "settings.json", "vocabulary.json"]
        found = [name for name in names if (self.path / name).exists()]
        found += [f"checkpoints/{name}" for name in self._foreign()]
        if found:
            raise InputError(
                "The folder of a run must be new, or one of a run",
                given=f"{self.path} with {', '.join(found[:3])}, and without a checkpoint",
                remedy='Name another one, e.g. out = "runs/first", or move what is there.',
            )

    def _check_checkpoints_only(self) -> None:
        found = self._foreign()
        if found:
            raise InputError(
                "To begin anew, the demo must find nothing but checkpoints among its own",
                given=f"{self._checkpoints.path} with {', '.join(found[:3])}",
                remedy="Move that, or name another folder, e.g. --out anybatch-demo-2",
            )

    def _foreign(self) -> list[str]:
        """What lies among the checkpoints and is none."""
        folder = self._checkpoints.path
        if not folder.exists():
            return []
        if not folder.is_dir():
            return ["(a file)"]
        own = {str(step) for step in self._checkpoints.steps()}
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        return [name for name in names if name not in own and not _LEFTOVER.fullmatch(name)]

    def _check_same(self) -> None:
        """Whether what is there is a run of the same model, on the same text."""
        now, before = dataclasses.asdict(self.config), self._stored
        ways_out = f"or take another folder, e.g. out = \"runs/second\"; or begin anew: rm -r '{self.path}'"
        for name in (*OF_THE_MODEL, "dropout"):
            same = now[name] == before.get(name, now[name])
            if name == "dropout" and name in before:
                same = bool(now[name]) == bool(before[name])  # without it, a run has no key to go on with
            if not same:
                raise InputError(
                    "A run that goes on must have the model it had before",
                    given=f"{name} = {written(now[name])}, and {name} = {written(before[name])} in {self.path}",
                    remedy=f"Go on with {name} = {written(before[name])}, {ways_out}",
                )
        stored = _stored_vocabulary(self.path / "vocabulary.json")
        if before.get("text_sha256", self._sum) != self._sum or stored not in (None, self.vocabulary):
            is_other = stored not in (None, self.vocabulary)
            sizes = f" of {self.vocabulary.size} tokens, and one of {stored.size}" if stored and is_other else ""
            raise InputError(
                "A run that goes on must have the text it had before",
                given=f"{self.name}{sizes or ', and another text'} in {self.path}",
                remedy=f"Name the text of that run{_named(before.get('text'))}, {ways_out}",
            )

    def _clear(self) -> None:
        """Removes an earlier demonstration: what the job wrote, and nothing else; not while another process writes."""
        self._checkpoints.open()
        try:
            self._checkpoints.tidy(keep=1)
            self._checkpoints.remove(self._checkpoints.steps())
            for name in OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
        finally:
            self._checkpoints.close()
        self.is_replaced = False


def expanded(path: str) -> pathlib.Path:
    """A path whose ~ is the user's folder; where nobody knows of such a user, it stays."""
    return pathlib.Path(os.path.expanduser(path))


def check_report(path: pathlib.Path, folder: pathlib.Path, text: str) -> None:
    """Whether a report can be written, and takes the place of nothing else.

    Args:
      path: of the report.
      folder: of the run.
      text: the path of what is learned; empty for what comes with anybatch.

    Raises:
      InputError: if it cannot.
    """
    report, home = _folded(path), _folded(folder)
    is_text = bool(text) and report == _folded(expanded(text))
    if is_text or report in {home / name for name in OWN_FILES} or report.is_relative_to(home / "checkpoints"):
        raise InputError(
            "The report must be a file of its own",
            given=f"report = {str(path)!r}, which {'is the text' if is_text else 'the run writes itself'}",
            remedy='For example: report = "anybatch-report.html"',
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            "The report must be a file in a folder that is there and can be written",
            given=f"report = {str(path)!r}",
            remedy=f'For example report = "anybatch-report.html", or first: mkdir -p "{path.parent}"',
        )
    check_path(path, given=f"report = {str(path)!r}")


def _folded(path: pathlib.Path) -> pathlib.Path:
    """A path to compare with others: links followed, and without case, which some file systems do not tell."""
    return pathlib.Path(os.path.realpath(path).casefold())


def _named(text: Any) -> str:
    return f" (text = {written(text)})" if text else ""


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """What a file of JSON has, by its names; nothing if it cannot be read."""
    try:
        found = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stored_vocabulary(path: pathlib.Path) -> Vocabulary | None:
    found = _read_object(path).get("characters", 0)
    return Vocabulary(found) if found is None or isinstance(found, str) else None


# Of what is held back, at most so many windows are looked at.
MOST_VALIDATION_WINDOWS = 64

# How many windows are verified, in double precision and at once, and in microbatches of which size.
VERIFIED, VERIFIED_AT_ONCE = 8, 4

# When what is held back costs so much more than it once did, the text is being learned by heart.
BY_HEART = 1.01


def run(config: RunConfig, *, command: str, resume: bool = True, is_demo: bool = False, console: Any = None) -> int:
    """Runs the job, and prints what it does.

    Args:
      config: what it was told.
      command: that runs it again, to be shown where that is of use.
      resume: whether to go on from a run that is in the folder. If not, there must be none.
      is_demo: whether it is the demonstration: its folder is marked, and it replaces one that came to its end.
      console: of rich, to print to.

    Returns:
      The exit code: 0, or 130 and 143 after Ctrl-C and SIGTERM.

    Raises:
      InputError: for what cannot be worked with, before any work is done.
    """
    job = Job(config, resume=resume, is_demo=is_demo)
    try:
        return job.run(command, console or _console())
    except KeyboardInterrupt:
        before = job.folder.steps_saved()
        where = "before the first step" if before is None else f"what was saved last is step {before}"
        (console or _console()).print(f"\nStopped: {where}. To go on: {command}", highlight=False, soft_wrap=True)
        return 130


class Job:
    """A text, a model and a folder, checked."""

    def __init__(self, config: RunConfig, *, resume: bool = True, is_demo: bool = False) -> None:
        self.config = config
        _check_packages()
        name = config.text or "the fables that come with anybatch"
        text = read_text(config.text, config.level)
        self.corpus = Corpus.of(
            text, level=config.level, context=config.context, validation=config.validation, name=name
        )
        self.name = name
        self.prompt = self.corpus.vocabulary.encode(config.prompt) if config.prompt else self.corpus.training[:8]
        # First the folder: the report may lie in it.
        self.folder = RunFolder(config, text, self.corpus.vocabulary, name=name, resume=resume, is_demo=is_demo)
        self.report = expanded(config.report) if config.report else None
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

    # What is trained, and how.

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
        """What it costs to say the next character, on average."""
        return self.model.loss(params, batch["tokens"], key)

    def optimizer(self) -> Any:
        """AdamW, with a learning rate that rises, and then falls as a cosine does."""
        import optax

        config = self.config
        highest, warmup = config.learning_rate, min(config.warmup, config.steps - 1)
        schedule = optax.warmup_cosine_decay_schedule(
            highest / (warmup + 1), highest, warmup, config.steps, end_value=highest / 10
        )

        def decays(params: Any) -> Any:  # what a norm scales by is left alone
            return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

        adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=decays)
        return optax.chain(optax.clip_by_global_norm(config.clip), adamw)

    def evaluation(self, at_once: int) -> Callable[[Any], dict[str, jax.Array]] | None:
        """The loss on what is held back, a few windows at once; None if nothing is."""
        if not len(self.corpus.validation):
            return None
        windows = jnp.asarray(self.corpus.validation_windows(self.config.context, MOST_VALIDATION_WINDOWS))

        @jax.jit
        def evaluate(params: Any) -> jax.Array:
            one = functools.partial(self.model.loss, params)
            return jnp.mean(jax.lax.map(lambda row: one(row[None]), windows, batch_size=min(at_once, len(windows))))

        return lambda state: {"loss": evaluate(state.params)}

    def sample(self, params: Any) -> str:
        """What it writes now."""
        config = self.config
        ids = self.model.sample(
            params,
            jnp.asarray(self.prompt, jnp.int32),
            jax.random.key(config.seed + 1),
            length=config.sample,
            temperature=config.temperature,
        )
        return self.corpus.vocabulary.decode(ids)

    # All of it.

    def run(self, command: str, console: Any) -> int:
        """Prints and trains. Returns the exit code."""
        begun = time.perf_counter()
        say, config = _Speaker(console), self.config
        seed, dropout_key = jax.random.split(jax.random.key(config.seed))
        params = self.model.init(seed)
        key = dropout_key if config.dropout else None
        windows = Windows(
            self.corpus.training,
            context=config.context,
            batch_size=config.batch,
            seed=config.seed,
            # Batches are asked for when what was saved is found to be of this run: a refused one writes nothing.
            opened=self.folder.write_settings,
        )
        first = windows.batch(0)
        keys = () if key is None else (key,)
        self._introduce(say, params)
        for change in self.folder.changes():
            say.text(change)

        say.heading("The loss")
        reading = read(self.loss, params, first, *keys)
        say.text(reading)

        say.heading("The plan")
        step = train_step(
            self.loss,
            self.optimizer(),
            noise_scale=True,
            tokens=lambda batch: batch["tokens"][:, 1:].size,
            memory=config.memory or None,
            remat=config.remat or None,
        )
        state = step.init(params, key)
        with say.busy("Planning") as notify:
            plan = step.explain(state, first, timed=False, progress=notify)
        if plan.chosen is None:
            raise NothingFitsError(f'{plan}\nHere, that is: memory = "a larger one", or remat = "auto".')
        say.text(plan)
        say.text(_in_words(plan))

        verification = None
        if config.verify:
            say.heading("The gradient")
            with say.busy("Verifying"):
                verification = self._verified(params, first, *keys)
            say.text(verification)
            verification.raise_if_different()

        samples = []
        if config.sample:
            samples.append(("Before training", self.sample(params)))
            say.heading(samples[0][0])
            say.text(samples[0][1])

        say.heading("Training")
        del params
        self.folder.begin()
        out = self.folder.path
        result = fit(
            step,
            state,
            windows,
            steps=config.steps,
            evaluate=(evaluate := self.evaluation(plan.microbatch_size or 1)),
            evaluate_every=config.evaluate_every if evaluate else None,
            log=out / "log.csv",
            checkpoints=out / "checkpoints",
            checkpoint_every=config.checkpoint_every,
            resume=self.folder.goes_on,
        )
        if result.stopped_by is not None and result.steps < config.steps:
            say.text(f"To go on: {command}")
            return result.exit_code

        if config.sample:
            samples.append((f"After {result.steps} steps", self.sample(result.state.params)))
            say.heading(samples[1][0])
            say.text(samples[1][1])

        say.heading("The result")
        notes = _learned(result)
        for note in [*notes, *_noise(result, config.batch)]:
            say.text(note)
        if self.report is not None:
            settings = {"parameters": f"{count(result.state.params):,}", **dataclasses.asdict(config)}
            report = Report(
                title=f"A GPT learns {self.name}",
                history=result.history,
                plan=plan,
                reading=reading,
                verification=verification,
                noise=result.noise,
                samples=samples,
                settings=settings,
                notes=notes,
            )
            say.text(f"The report: {report.write(self.report)}")
        say.text(f"Checkpoints and log: {out}. All of it took {time.perf_counter() - begun:.0f} s.")
        return result.exit_code

    def _introduce(self, say: "_Speaker", params: Any) -> None:
        config, corpus, device = self.config, self.corpus, jax.local_devices()[0]
        tokens = len(corpus.training) + len(corpus.validation)
        what, unit = config.level, "bytes" if config.level == "bytes" else "characters"
        say.title(f"A GPT of {count(params):,} parameters learns {self.name}: {tokens:,} {what}")
        say.text(
            f"Each step takes the exact gradient of {config.batch} windows of {config.context} {unit}, "
            f"{'in ' + config.memory if config.memory else 'in the memory there is'}, "
            f"on {device.device_kind}, with JAX {versions.versions()[0]}."
        )

    def _verified(self, params: Any, batch: Any, *keys: jax.Array) -> Verification:
        examples = min(VERIFIED, self.config.batch)
        # Verification puts arrays where they are. If that was decided before, nothing is compiled again for it.
        params = jax.device_put(params, jax.local_devices()[0])
        return verify(
            self.loss, params, batch, *keys, sample=examples, microbatch_sizes=min(VERIFIED_AT_ONCE, examples)
        )


class _Speaker:
    """Prints to a console. Brackets in what is computed are no markup, and control characters control nothing."""

    def __init__(self, console: Any) -> None:
        self._console = console

    def title(self, text: str) -> None:
        self._console.print(visible(text), style="bold", markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold cyan", markup=False, highlight=False)

    def text(self, text: Any) -> None:
        self._console.print(visible(str(text)), markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Says in a terminal what is being done, while it is."""
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield status.update


def _in_words(plan: Plan) -> str:
    """What the whole batch would take, and what it takes."""
    full = next((each for each in plan.candidates if each.microbatch_size == plan.num_examples), None)
    if full is None or full.total is None or plan.chosen is None or plan.chosen.total is None:
        return ""
    if plan.chosen == full or plan.budget is None:
        return f"All {plan.num_examples} at once take {readable(full.total)}, and that fits."
    times = full.total / plan.budget
    many = f"{times:.0f} times" if times >= 1.5 else f"{times:.2f} times"
    return (
        f"All {plan.num_examples} at once would take {readable(full.total)}: {many} the budget. In microbatches of "
        f"{plan.chosen.microbatch_size} it is {readable(plan.chosen.total)}, for the same gradient."
    )


def _learned(result: Fitted) -> list[str]:
    """How the losses changed, and whether what was learned is more than the text by heart."""
    losses = [(row["step"], row["loss"]) for row in result.history if row.get("loss") is not None]
    held_back = [(row["eval.loss"], row["step"]) for row in result.history if row.get("eval.loss") is not None]
    if not losses:
        return []
    notes = [f"{result.steps} steps in {result.seconds:.0f} s: {_changed(losses)}."]
    finite = [each for each in held_back if math.isfinite(each[0])]
    if held_back and not math.isfinite(held_back[-1][0]):
        notes.append("On the text that was held back it is not finite.")
    elif held_back:
        last, (best, at) = held_back[-1][0], min(finite)
        notes.append(f"On the text that was held back it is {last:.2f}.")
        if last > BY_HEART * best:
            notes[-1] = (
                f"On the text that was held back it is {last:.2f}, and was {best:.2f} after step {at}: since then the "
                "text is learned by heart, as a small text is by a model that is large for it."
            )
    return notes


def _changed(losses: list[tuple[int, float]]) -> str:
    """What became of the loss, from the first step to the last."""
    if not math.isfinite(losses[-1][1]):
        since = losses[-1][0]
        for step, loss in reversed(losses):
            if math.isfinite(loss):
                break
            since = step
        return f"the loss is not finite since step {since}"
    first, last = next(loss for _, loss in losses if math.isfinite(loss)), losses[-1][1]
    if f"{first:.2f}" == f"{last:.2f}":
        return f"the loss did not change, and is {last:.2f}"
    return f"the loss {'fell' if last < first else 'rose'} from {first:.2f} to {last:.2f}"


def _noise(result: Fitted, batch: int) -> list[str]:
    """What the noise scale says about the batch."""
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


def _check_packages() -> None:
    missing = [name for name in ("optax", "orbax", "rich", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            "Training a GPT needs optax, orbax-checkpoint, rich and jinja2",
            given=f"a Python without {' and '.join(missing)}",
            remedy='pip install "anybatch[cli,train]"',
        )


def _console() -> Any:
    from rich.console import Console

    return Console()


SMALL = RunConfig(
    out="anybatch-demo",
    layers=2,
    width=96,
    context=32,
    batch=256,
    memory="14MiB",
    steps=200,
    learning_rate=1e-2,
    warmup=10,
    evaluate_every=20,
    checkpoint_every=60,
    prompt="The ",
    temperature=0.5,
)

# As large as the smallest GPT-2, but for its vocabulary: 85 million parameters.
GPU_SIZE = RunConfig(
    out="anybatch-demo-gpu",
    layers=12,
    heads=12,
    width=768,
    context=512,
    dropout=0.1,
    dtype="bfloat16",
    batch=512,
    memory="12GiB",
    steps=200,
    learning_rate=1e-3,
    warmup=20,
    evaluate_every=20,
    checkpoint_every=100,
    prompt="The ",
    sample=800,
)


def run_demo(*, gpu_size: bool = False, resume: bool = True, **changes: Any) -> int:
    """Runs the demonstration.

    Args:
      gpu_size: whether to take the model for an accelerator.
      resume: whether to go on with one that was stopped. One that came to its end is begun anew.
      **changes: settings that are other than usual; None for those that are not.

    Returns:
      The exit code.

    Raises:
      InputError: if the folder has something else in it than a demonstration, which alone is replaced.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(GPU_SIZE if gpu_size else SMALL, **given)
    words = ["anybatch demo", *(["--gpu-size"] if gpu_size else [])]
    words += [f"--{name} {shlex.quote(str(value))}" for name, value in given.items()]
    return run(config, command=" ".join(words), resume=resume, is_demo=True)
