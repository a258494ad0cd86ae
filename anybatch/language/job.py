"""The job behind `anybatch demo` and `anybatch train`: a GPT learns a text, in a memory that its batch does not fit."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from anybatch import compat
from anybatch.errors import InputError, NothingFitsError
from anybatch.language.config import RunConfig
from anybatch.language.folder import RunFolder, check_report, expanded
from anybatch.language.gpt import GPT, count
from anybatch.language.text import Corpus, Windows, read_text
from anybatch.memory import readable
from anybatch.planning.report import Plan
from anybatch.read import read
from anybatch.report import Report
from anybatch.report.drawing import visible
from anybatch.training.loop import Fitted, fit
from anybatch.training.step import train_step
from anybatch.verify import Verification, verify

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
            f"on {device.device_kind}, with JAX {compat.versions()[0]}."
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
