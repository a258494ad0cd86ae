"""What a run of `anybatch train` can be told, in a file of TOML."""

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

# Of a file of settings.
MOST_BYTES = 2**20


def _setting(default: Any, about: str, **allowed: Any) -> Any:
    return dataclasses.field(default=default, metadata={"about": about, **allowed})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run that learns a text. Every setting has a default, and is checked when it is made.

    >>> RunConfig(steps=0)
    Traceback (most recent call last):
    anybatch.errors.InputError: steps must be a whole number of at least 1 and at most 1,000,000,000, got steps = 0.
    For example: steps = 1000
    """

    text: str = _setting(
        "", "a file of yours, as seen from where you are; empty for the fables of the demo", is_path=True
    )
    level: str = _setting("characters", "what a token is; bytes will do for any encoding", choices=LEVELS)
    validation: float = _setting(0.1, "the share at the end of the text that is held back", least=0.0, below=1.0)
    out: str = _setting(
        "anybatch-run", "the folder for checkpoints, the log and the vocabulary", filled=True, is_path=True
    )
    report: str = _setting("anybatch-report.html", "where the report goes; empty for none", is_path=True)

    layers: int = _setting(4, "of the GPT", least=1, most=10**4)
    heads: int = _setting(4, "of attention, in each layer", least=1, most=10**4)
    width: int = _setting(128, "a multiple of twice the heads", least=2, most=10**6)
    context: int = _setting(64, "how many tokens it looks back on", least=1, most=10**7)
    dropout: float = _setting(0.0, "the share of each layer's work that is left out in training", least=0.0, below=1.0)
    dtype: str = _setting("float32", "in which the layers compute", choices=("float32", "bfloat16"))

    batch: int = _setting(256, "windows of the text in each step, however many fit at once", least=1, most=10**7)
    memory: str = _setting("", 'what a step may take: "64MiB", "8GiB", "80%" of what is left; empty for what there is')
    remat: str = _setting("", "computes activations twice, to save memory", choices=("", "auto", *POLICIES))
    steps: int = _setting(1000, "how many", least=1, most=10**9)
    learning_rate: float = _setting(3e-3, "at its highest; it rises first, and falls to a tenth", above=0.0)
    warmup: int = _setting(20, "steps in which it rises", least=0, most=10**9)
    weight_decay: float = _setting(0.1, "of AdamW", least=0.0)
    clip: float = _setting(1.0, "the largest norm of a gradient that is not scaled down", above=0.0)
    seed: int = _setting(0, "of everything that is drawn", least=0, below=2**32)

    evaluate_every: int = _setting(50, "steps", least=1, most=10**9)
    checkpoint_every: int = _setting(100, "steps", least=1, most=10**9)
    verify: bool = _setting(True, "compare the gradient of some windows with that of the full batch, first")
    prompt: str = _setting("", "what the samples begin with; empty for the beginning of the text")
    sample: int = _setting(400, "how many tokens they have", least=0, most=10**7)
    temperature: float = _setting(0.6, "of the samples: below 1, it prefers what is likely", least=0.0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # Whole numbers will do where others are meant.
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
        """The settings in a file.

        Raises:
          InputError: if it cannot be read, is no TOML, or has settings that are not known or not allowed.
        """
        try:
            text = read_regular(path, MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            new = path if isinstance(error, FileNotFoundError) else "run.toml"
            raise InputError(
                "The settings must be in a file that can be read",
                given=f"{shown(path)} ({reason})",
                remedy=f"Make one: anybatch train --example > {new}",
            ) from None
        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                "The settings must be TOML: one `name = value` in each line, texts in quotes",
                given=f"{path}: {error}",
                remedy="anybatch train --example shows one.",
            ) from None
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in given.items():
            where = _line_of(name, text, path)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                raise InputError(
                    "Every setting must be one that is known",
                    given=f"{name!r} in {where}",
                    remedy=(f"Did you mean {near[0]}? " if near else "") + f"There are: {', '.join(known)}.",
                )
            try:
                _checked(known[name], value)
            except InputError as error:
                raise InputError(error.must, given=f"{error.given} in {where}", remedy=error.remedy) from None
        return cls(**given)


def example_config() -> str:
    """All settings with their defaults, as a file to begin with.

    >>> tomllib.loads(example_config())["batch"]
    256
    """
    gaps = ("layers", "batch", "evaluate_every")
    lines = ["# A run of anybatch train. What is left out has the value that is shown here."]
    for field in dataclasses.fields(RunConfig):
        choices = " | ".join(f'"{choice}"' for choice in field.metadata.get("choices", ()))
        about = field.metadata["about"] + (f"; {choices}" if choices else "")
        lines += [""] if field.name in gaps else []
        lines.append(f"{f'{field.name} = {written(field.default)}':<34}# {about}")
    return "\n".join(lines) + "\n"


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """A value of a setting, if it is allowed."""
    allowed, kind = field.metadata, type(field.default)
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    limits = (
        allowed.get("least") is None or _is_so(value, ">=", allowed["least"]),
        allowed.get("above") is None or _is_so(value, ">", allowed["above"]),
        allowed.get("most") is None or _is_so(value, "<=", allowed["most"]),
        allowed.get("below") is None or _is_so(value, "<", allowed["below"]),
        allowed.get("choices") is None or value in allowed["choices"],
        not allowed.get("filled") or bool(str(value).strip()),
    )
    must = f"{field.name} must be {_requirement(kind, allowed)}"
    if allowed.get("is_path") and "\0" in str(value):
        must = f"{field.name} must be the name of a file or a folder, which has no NUL character"
    elif type(value) is kind and all(limits):
        return value
    given = written(value) if isinstance(value, (bool, int, float, str)) else repr(value)
    raise InputError(
        must,
        given=f"{field.name} = {given}",
        remedy=f"For example: {field.name} = {written(field.default)}",
    )


def _is_so(value: Any, relation: str, limit: Any) -> bool:
    """Whether a number is on the right side of a limit; what is no number, or not finite, is not."""
    if not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return bool({">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}[relation](value, limit))


def _requirement(kind: type, allowed: Any) -> str:
    if "choices" in allowed:
        return "one of " + ", ".join(f'"{choice}"' for choice in allowed["choices"])
    words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}[kind]
    if allowed.get("filled"):
        return f"{words}, and not empty"
    bounds = [("least", "of at least"), ("above", "above"), ("most", "at most"), ("below", "below")]
    told = [f"{text} {_number(allowed[name])}" for name, text in bounds if name in allowed]
    return " ".join([words, " and ".join(told)]).strip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def written(value: Any) -> str:
    """A value as TOML has it.

    >>> written("a"), written(True), written(0.5)
    ('"a"', 'true', '0.5')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return '"' + re.sub("[\0-\x1f\x7f]", lambda control: f"\\u{ord(control[0]):04x}", escaped) + '"'
    return f"{value}"


def shown(path: Any) -> str:
    """A path as a message shows it."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _line_of(name: str, text: str, path: Any) -> str:
    """Where a setting stands, if that is easily seen."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[.=\]]""", line):
            return f"{path}, line {number}"
    return str(path)
