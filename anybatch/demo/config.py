"""The options of `anybatch train` and `anybatch demo`, and the TOML file they are read from."""

import dataclasses
import difflib
import math
import operator
import pathlib
import re
import tomllib
from typing import Any

from anybatch.call.files import read_regular
from anybatch.call.memory import memory_budget
from anybatch.call.options import POLICIES
from anybatch.demo.text import LEVELS
from anybatch.errors import InputError

MOST_BYTES = 2**20  # of a TOML file

# The bounds of a number: the relation that must hold, and how a message says it.
BOUNDS = {
    "least": (operator.ge, "of at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def _option(default: Any, about: str, **allowed: Any) -> Any:
    """A field of `RunConfig`: its default, its comment in the example file, and which values are allowed."""
    return dataclasses.field(default=default, metadata={"about": about, **allowed})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The options of a run. Each has a default, and is checked when the object is created.

    >>> RunConfig(steps=0)
    Traceback (most recent call last):
    anybatch.errors.InputError: steps must be a whole number of at least 1 and at most 1,000,000,000, got steps = 0.
    For example: steps = 1000
    """

    text: str = _option("", "your text file, relative to the current folder; empty for the demo's fables", is_path=True)
    level: str = _option("characters", "what a token is; bytes work for any encoding", choices=LEVELS)
    validation: float = _option(
        0.1, "the share of the text, at its end, that is used for validation only", least=0.0, below=1.0
    )
    out: str = _option(
        "anybatch-run", "the folder for checkpoints, the log and the vocabulary", filled=True, is_path=True
    )
    report: str = _option("anybatch-report.html", "the file for the report; empty for none", is_path=True)

    layers: int = _option(4, "layers of the GPT", least=1, most=10**4)
    heads: int = _option(4, "attention heads in each layer", least=1, most=10**4)
    width: int = _option(128, "features per token; a multiple of twice the heads", least=2, most=10**6)
    context: int = _option(64, "tokens that the model sees at a time", least=1, most=10**7)
    dropout: float = _option(0.0, "the dropout rate in training", least=0.0, below=1.0)
    dtype: str = _option("float32", "the dtype that the layers compute in", choices=("float32", "bfloat16"))

    batch: int = _option(
        256, "windows of the text in each step; they need not fit into memory at once", least=1, most=10**7
    )
    memory: str = _option("", 'memory for a step: "64MiB", "8GiB", "80%" of the free memory; empty for all of it')
    remat: str = _option("", "recompute activations, to save memory", choices=("", "auto", *POLICIES))
    steps: int = _option(1000, "number of steps", least=1, most=10**9)
    learning_rate: float = _option(3e-3, "the peak; it falls to a tenth of that", above=0.0)
    warmup: int = _option(20, "steps in which the learning rate rises", least=0, most=10**9)
    weight_decay: float = _option(0.1, "of AdamW", least=0.0)
    clip: float = _option(1.0, "gradients with a larger norm are scaled down to this", above=0.0)
    seed: int = _option(0, "the seed of all random numbers", least=0, below=2**32)

    evaluate_every: int = _option(50, "steps between evaluations", least=1, most=10**9)
    checkpoint_every: int = _option(100, "steps between checkpoints", least=1, most=10**9)
    verify: bool = _option(True, "first compare the gradient in microbatches with the full batch's, on a few windows")
    prompt: str = _option("", "how the samples begin; empty for the beginning of the text")
    sample: int = _option(400, "tokens in a sample", least=0, most=10**7)
    temperature: float = _option(0.6, "of the samples; below 1, likely tokens become likelier", least=0.0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # `_checked` turns an int into a float where a float is expected.
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        if self.width % (2 * self.heads):
            nearest = max(round(self.width / (2 * self.heads)), 1) * 2 * self.heads
            raise InputError(
                "width must be a multiple of twice the heads",
                given=f"width = {self.width} and heads = {self.heads}",
                remedy=f"For example: width = {nearest}",
            )
        memory_budget(self.memory or None)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "RunConfig":
        """Reads the options from a TOML file.

        Raises:
          InputError: if the file cannot be read, is not TOML, or has an option that is unknown or not allowed.
        """
        try:
            text = read_regular(path, MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            new = path if isinstance(error, FileNotFoundError) else "run.toml"
            raise InputError(
                "The options must be in a file that can be read",
                given=f"{_shown(path)} ({reason})",
                remedy=f"Create one: anybatch train --example > {new}",
            ) from None
        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                "The file with the options must be TOML: one `name = value` in each line, strings in quotes",
                given=f"{path}: {error}",
                remedy="anybatch train --example prints such a file.",
            ) from None
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in given.items():
            where = _line_of(name, text, path)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                raise InputError(
                    "Every option must be one of a run",
                    given=f"{name!r} in {where}",
                    remedy=(f"Did you mean {near[0]}? " if near else "") + f"The options are: {', '.join(known)}.",
                )
            try:
                _checked(known[name], value)
            except InputError as error:
                raise InputError(error.must, given=f"{error.given} in {where}", remedy=error.remedy) from None
        return cls(**given)


def example_config() -> str:
    """A TOML file with all options and their defaults.

    >>> tomllib.loads(example_config())["batch"]
    256
    """
    gaps = ("layers", "batch", "evaluate_every")
    lines = ["# The options of anybatch train. An option that is left out has the value shown here."]
    for field in dataclasses.fields(RunConfig):
        choices = " | ".join(f'"{choice}"' for choice in field.metadata.get("choices", ()))
        about = field.metadata["about"] + (f"; {choices}" if choices else "")
        lines += [""] if field.name in gaps else []
        lines.append(f"{f'{field.name} = {as_toml(field.default)}':<34}# {about}")
    return "\n".join(lines) + "\n"


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """The value of an option. Raises an InputError if it is not allowed."""
    allowed, kind = field.metadata, type(field.default)
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    must = f"{field.name} must be {_requirement(kind, allowed)}"
    if allowed.get("is_path") and "\0" in str(value):
        must = f"{field.name} must be the name of a file or a folder, without a NUL character"
    elif type(value) is kind and _is_allowed(value, allowed):
        return value
    given = as_toml(value) if isinstance(value, (bool, int, float, str)) else repr(value)
    raise InputError(
        must,
        given=f"{field.name} = {given}",
        remedy=f"For example: {field.name} = {as_toml(field.default)}",
    )


def _is_allowed(value: Any, allowed: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    is_inside = all(holds(value, allowed[name]) for name, (holds, _) in BOUNDS.items() if name in allowed)
    return is_inside and value in allowed.get("choices", (value,)) and not (allowed.get("filled") and not value.strip())


def _requirement(kind: type, allowed: Any) -> str:
    if "choices" in allowed:
        return "one of " + ", ".join(f'"{choice}"' for choice in allowed["choices"])
    words = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}[kind]
    if allowed.get("filled"):
        return f"{words}, and not empty"
    limits = [(text, allowed[name]) for name, (_, text) in BOUNDS.items() if name in allowed]
    parts = [f"{text} {limit:,}" if isinstance(limit, int) else f"{text} {limit:g}" for text, limit in limits]
    return " ".join([words, " and ".join(parts)]).strip()


def as_toml(value: Any) -> str:
    """A value in the syntax of TOML.

    >>> as_toml("a"), as_toml(True), as_toml(0.5)
    ('"a"', 'true', '0.5')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return '"' + re.sub("[\0-\x1f\x7f]", lambda control: f"\\u{ord(control[0]):04x}", escaped) + '"'
    return f"{value}"


def _shown(path: Any) -> str:
    """A path for a message, with control characters escaped."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _line_of(name: str, text: str, path: Any) -> str:
    """The file, and the line in which an option is set if a simple search finds it."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[.=\]]""", line):
            return f"{path}, line {number}"
    return str(path)


# The options of `anybatch demo`: a minute on two cores.
SMALL_DEMO = RunConfig(
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

# The options of `anybatch demo --gpu-size`. The model is the smallest GPT-2 with a vocabulary of characters: 85 million
# parameters.
GPU_DEMO = RunConfig(
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
