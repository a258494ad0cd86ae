"""What was read of a loss, as a record to print and to plan with.

`report` makes the `Reading` of a loss that was split. `form_of` finds out what the loss is over its examples: a mean, a
sum, a ratio of sums and so on.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

from anybatch.call.display import escape, html_table, in_notebook
from anybatch.call.memory import readable
from anybatch.call.tables import Column, wrapped
from anybatch.jaxprs import interpreter, source
from anybatch.jaxprs.graph import Node, Value, sources, written_bytes
from anybatch.jaxprs.primitives import FUSED, RANDOM_DRAWS
from anybatch.reading.evaluation import constant_value
from anybatch.reading.split import Seeds, Split
from anybatch.reading.states import INVARIANT, SUMMED, Batched, Blame, Coupling, Head

_MAX_SHOWN = 5  # lines that are blamed, in what is printed

# A sum stays a sum of the same kind, but for its sign, its shape and its dtype.
_UNCHANGED = frozenset(
    "convert_element_type reshape squeeze broadcast_in_dim copy copy_p neg name transpose reduce_precision".split()
)
_FUNCTIONS = {"sqrt": "square root", "log": "logarithm", "exp": "exponential", "rsqrt": "inverse square root"}


class LossKind(enum.StrEnum):
    """What a loss, or a term of it, is over its examples."""

    MEAN = enum.auto()  # of a term for each example
    SUM = enum.auto()  # of a term for each example
    RATIO = enum.auto()  # of sums over the examples
    FUNCTION = enum.auto()  # of sums over the examples, such as the square root of a mean
    OF_DATA = enum.auto()  # of data that is known before the first microbatch
    SEVERAL = enum.auto()  # terms of different kinds, added up
    COUPLED = enum.auto()  # needs rows of several examples at once
    INVARIANT = enum.auto()  # does not depend on the batch
    OUTPUTS = enum.auto()  # no loss, but a function with several outputs, each with a form of its own
    ROWS = enum.auto()  # an output with rows for each example


@dataclasses.dataclass(frozen=True)
class LossForm:
    """What a loss, or a term of it, is over its examples: its kind, and how to say it."""

    kind: LossKind
    words: str  # the same for people to read, with the number of examples
    selection: int | None = None  # of a mean or a sum: the rows that the loss selected from the batch; None: all
    parts: tuple["LossForm", ...] = ()  # the terms that are added up, or those of the value that it is a function of
    adds_parameters: bool = False  # a term of the parameters alone is added

    def contains(self, kind: LossKind) -> bool:
        """Whether it, or one of its parts, is of a kind."""
        return self.kind is kind or any(part.contains(kind) for part in self.parts)


class Randomness(enum.StrEnum):
    """Which random numbers the microbatches draw."""

    NONE = "none"
    EXACT = "exact"  # their rows of those that the full batch would draw
    IN_DISTRIBUTION = "in distribution"  # their own


@dataclasses.dataclass(frozen=True)
class Frontier:
    """A value that the microbatches compute and the head uses: a sum that is added up, or rows that are gathered."""

    how: str  # "sum" or "rows"
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    file: str
    line: int

    def __str__(self) -> str:
        return self.text()

    def text(self, times: int = 1) -> str:
        """The value in words; or so many values that differ in nothing that is shown."""
        verb, number = "adds up" if self.how == "sum" else "gathers", f"{times} x " if times > 1 else ""
        place = f" from {self.file}:{self.line}" if self.file else ""
        size = readable(self.bytes) + (" each" if times > 1 else "")
        return f"{verb} {number}{self.dtype}[{','.join(map(str, self.shape))}] ({size}){place}"


@dataclasses.dataclass(frozen=True, repr=False)
class Reading:
    """How a loss uses its examples, as read from its jaxpr. Prints as a summary.

    Args:
      form: what the loss is over its examples, such as a mean, a ratio of sums, or coupled.
      separable: whether the gradient needs only sums over the examples.
      passes: the number of passes over the batch, 1 or 2.
      stochastic: whether the loss draws random numbers.
      randomness: "none", "exact" (a microbatch draws its rows of what the full batch would draw), or
        "in distribution" (it draws its own). The values are those of `Randomness`.
      frontier: the values that are added up or gathered for the head, which is computed once.
      blame: the lines that look across examples, in the order of the program.
      rearranged: the lines that select, sort or shift rows of the data before the parameters meet them. The gradient is
        still exact. A row that the model sees may come from several examples, or from padding.
      num_examples: the size of the batch.
      head_bytes: about how many bytes the head computes, from the full batch.
      activation_bytes: about how many bytes the loss computes from the batch in all.
      gathered_bytes: the bytes of the rows that are gathered for the head and have a gradient.
      seen_whole: arguments that have a row for each example but are not part of the batch, so that every microbatch
        sees all of their rows. Only `anybatch.read` looks for them.
      layers_in_head: whether layers of the model are computed from the full batch.
      wide: values that are much larger than what they are computed from, such as logits, and whether `block_size` can
        compute them in blocks. Only `anybatch.read` looks for them; otherwise it is None.
      outputs: for a function of `map_batch`, the name and the form of each output. None for a loss.
    """

    form: LossForm
    separable: bool
    passes: int
    stochastic: bool
    randomness: Randomness
    frontier: tuple[Frontier, ...]
    blame: tuple[Blame, ...]
    rearranged: tuple[Blame, ...]
    num_examples: int
    head_bytes: int
    activation_bytes: int
    gathered_bytes: int = 0
    layers_in_head: bool = False
    seen_whole: tuple[str, ...] = ()
    wide: tuple[Any, ...] | None = None
    outputs: tuple[tuple[str, LossForm], ...] | None = None

    @property
    def kind(self) -> str:
        """The form in words: "mean over 64 examples", "ratio of sums", "couples examples", ..."""
        return self.form.words

    @property
    def advice(self) -> str:
        """What to do about a loss that looks across examples; empty if it does not."""
        if not self.blame:
            return ""
        first = self.blame[0]
        if first.reason is Coupling.NO_RULE:
            teach = f'Teach it: anybatch.register_rule("{first.primitive}", rule).'
            declare = 'Or declare how the loss uses its examples: reduction="mean", "sum" or "weighted".'
            return teach if self.outputs is not None else f"{teach} {declare}"
        is_loss = self.outputs is None
        result, kind = ("gradient", "loss") if is_loss else ("result", "function")
        exact = f"As it is, the {result} is exact, and everything after that line runs on the full batch."
        refuse = "" if self.is_norm_over_batch else f' on_coupled="error" refuses such a {kind}.'
        return f"{exact} {self.remedy}".rstrip() + refuse

    @property
    def full_batch_bytes(self) -> int:
        """About how many bytes of activations stay, however small the microbatches are.

        These are what the head computes, and the rows that are gathered for it.
        """
        return self.head_bytes + self.gathered_bytes

    @property
    def full_batch_share(self) -> float:
        """`full_batch_bytes` as a share of all activations, at most 1."""
        return min(1.0, self.full_batch_bytes / max(self.activation_bytes, 1))

    @property
    def remedy(self) -> str:
        """How to write such a loss so that it takes less memory; empty if the line does not tell."""
        if self.is_norm_over_batch:
            return (
                "If the line is a norm over the batch, as BatchNorm in training is, GroupNorm or LayerNorm "
                'keep the examples apart. reduction="mean" takes the statistics of each microbatch instead, which is '
                "another loss."
            )
        if not self.blame or self.blame[0].primitive != "dot_general":
            return ""
        if self.wide is None:
            return "block_size=128 may compare so many rows at a time with all others: anybatch.read says if it can."
        if any(value.axis is not None and not value.per_example for value in self.wide):
            return "To take less, pass block_size=128, or another number: so many rows are then compared at a time."
        return ""

    @property
    def is_norm_over_batch(self) -> bool:
        """Whether the first line that looks across examples may be a BatchNorm: by its name, or layers after it."""
        if not self.blame or self.blame[0].reason is not Coupling.FED_BACK:
            return False
        names = f"{self.blame[0].inside} {self.blame[0].function}".lower().replace("_", "")
        return self.layers_in_head or "batchnorm" in names

    @property
    def how(self) -> str:
        """The passes over the microbatches, in words."""
        if self.passes == 2:
            return "two passes over the microbatches"
        if not self.separable:
            return "each microbatch is computed once, then the coupled part once for the full batch"
        return "one pass over the microbatches"

    def __str__(self) -> str:
        return wrapped("\n".join([f"{self.kind}: {self.how}", *(f"  {line}" for line in self._lines())]))

    __repr__ = __str__

    def _lines(self) -> list[str]:
        lines = [f"returns {name}: {form.words}" for name, form in self.outputs or ()]
        lines += self._frontier_lines()
        if self.randomness is Randomness.EXACT:
            lines.append("draws random numbers: each microbatch those that the full batch would draw for it")
        elif self.stochastic:
            lines.append("draws random numbers: each microbatch its own, equal in distribution to the full batch's")
        if self.blame:
            lines.append("looks across examples:")
            lines += [f"  {blame}" for blame in self.blame[:_MAX_SHOWN]]
            if len(self.blame) > _MAX_SHOWN:
                lines.append(f"  and {len(self.blame) - _MAX_SHOWN} more")
            lines.append(
                f"needs for the full batch: about {readable(self.full_batch_bytes)}, "
                f"{round(100 * self.full_batch_share)}% of all activations"
                + (", and as much again or more for its gradient" if self.outputs is None else "")
            )
            lines.append(self.advice)
        if self.rearranged:
            lines.append("selects, sorts or shifts rows of the data:")
            lines += [f"  {blame}" for blame in self.rearranged[:_MAX_SHOWN]]
        if self.wide:
            lines.append("has values that are much larger than what they are computed from:")
            lines += [f"  {value}" for value in self.wide[:_MAX_SHOWN]]
        if self.seen_whole:
            lines.append(
                f"every microbatch sees all rows of {', '.join(self.seen_whole)}: if these belong to the examples, "
                "name them with batch_argnums= or batch_argnames="
            )
        return lines

    def _frontier_lines(self) -> list[str]:
        return [item.text(len(list(equal))) for item, equal in itertools.groupby(self.frontier)]

    def html_table(self, caption: str = "") -> str:
        """The values that are added up or gathered, as a table in HTML. Empty if there are none."""
        if not self.frontier:
            return ""
        values = self.frontier
        columns = [
            Column("how", tuple("added up" if each.how == "sum" else "gathered" for each in values), is_left=True),
            Column("array", tuple(f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in values), is_left=True),
            Column("size", tuple(readable(each.bytes) for each in values)),
            Column("where", tuple(f"{each.file}:{each.line}" if each.file else "" for each in values), is_left=True),
        ]
        return html_table(columns, [""] * len(values), caption)

    def _repr_html_(self) -> str:
        # A line that is indented in the text belongs to the line before it.
        items: list[str] = []
        table = self._frontier_lines()
        for line in (line for line in self._lines() if line not in table):
            text = escape(line.strip())
            if line.startswith(" "):
                items[-1] += f"<ul><li><code>{text}</code></li></ul>"
            else:
                items.append(text)
        rest = "".join(f"<li>{item}</li>" for item in items)
        return in_notebook(
            f'<p class="lead"><b>{escape(self.kind)}</b></p>\n<p class="about">{escape(self.how)}</p>\n',
            self._share_bar() if self.blame else "",
            self.html_table(),
            f"<ul>{rest}</ul>\n" if rest else "",
        )

    def _share_bar(self) -> str:
        """A bar of all activations: the part that microbatches compute, and the part that the full batch needs."""
        full, width = self.full_batch_bytes, round(400 * self.full_batch_share, 1)
        text = f"needed for the full batch: about {readable(full)} of {readable(max(self.activation_bytes, full))}"
        return (
            f'<figure data-figure="share"><svg class="plot bar" viewBox="0 0 400 34" role="img" aria-label="{text}">'
            f'<path class="part" d="M0 6H400"/><path class="part orange" d="M0 6H{max(width, 2.0)}"/>'
            f'<text x="0" y="29">{text}</text></svg></figure>\n'
        )


def report(split: Split) -> Reading:
    """The `Reading` of a loss that was split."""
    draws = _generators(split.loss.traced.jaxpr)
    of_draws = Randomness.EXACT if all(name == "key<fry>" for name in draws) else Randomness.IN_DISTRIBUTION
    gathered = [split.frontier[each] for each in split.differentiated if isinstance(split.states[each], Batched)]
    outputs = _outputs(split) if split.loss.maps else None
    couples = split.loss_couples if outputs is None else any(form.kind is LossKind.COUPLED for _, form in outputs)
    return Reading(
        form=form_of(split) if outputs is None else _form_of_outputs(outputs),
        outputs=outputs,
        separable=not (gathered or couples or split.reader.kept_in_full),
        passes=2 if split.seeds == Seeds.BETWEEN else 1,
        stochastic=bool(draws),
        randomness=of_draws if draws else Randomness.NONE,
        frontier=tuple(_frontier(split, value) for value in split.frontier),
        blame=tuple(dict.fromkeys(split.reader.blames)),
        rearranged=tuple(dict.fromkeys(split.reader.rearranged.values())),
        num_examples=split.loss.num_examples,
        head_bytes=sum(_bytes(node, split) for node in split.full_batch_nodes),
        activation_bytes=sum(_bytes(node, split) for node in split.graph.nodes),
        gathered_bytes=sum(value.num_bytes for value in gathered),
        layers_in_head=split.head_has_layers,
    )


def _frontier(split: Split, value: Value) -> Frontier:
    place = source.SourceLine() if value.node is None else source.locate(value.node)
    how = "rows" if isinstance(split.reader.state(value), Batched) else "sum"
    return Frontier(how, value.shape, str(value.dtype), value.num_bytes, place.file, place.line)


def _bytes(node: Node, split: Split) -> int:
    """About how many bytes a node writes to memory for the full batch."""
    if not any(split.reader.uses_batch[output] for output in node.outputs) or node.name in FUSED:
        return 0
    if node.name == "scan":
        return node.params["length"] * written_bytes(node.params["jaxpr"])
    inside = map(written_bytes, interpreter.jaxprs_in(node.equation))
    return sum(output.num_bytes for output in node.outputs) + sum(inside)


def _generators(jaxpr: Any) -> set[str]:
    """The dtypes of the keys that random numbers are drawn from, at any depth."""
    draws = [equation for equation in interpreter.walk(jaxpr) if equation.primitive.name in RANDOM_DRAWS]
    return {str(equation.invars[0].aval.dtype) for equation in draws}


_RATIO = LossForm(LossKind.RATIO, "ratio of sums")
_COUPLED = LossForm(LossKind.COUPLED, "couples examples")
_INVARIANT = LossForm(LossKind.INVARIANT, "does not depend on the batch")


def form_of(split: Split) -> LossForm:
    """What a loss is over its examples: "mean over 64 examples", "ratio of sums", "couples examples", ..."""
    loss = split.graph.outputs[0]
    if not split.reader.depends_on_batch(loss):
        return _INVARIANT
    return _COUPLED if split.loss_couples else _Forms(split).of_terms(loss)


def _outputs(split: Split) -> tuple[tuple[str, LossForm], ...]:
    """The name and the form of each output of a function that is no loss."""
    forms = [_form_of_output(split, value) for value in split.graph.outputs[split.loss.num_heads :]]
    return tuple(zip(split.loss.aux_names, forms, strict=True))


def _form_of_output(split: Split, value: Value) -> LossForm:
    state = split.reader.state(value)
    if not split.reader.depends_on_batch(value):
        return _INVARIANT
    if isinstance(state, Batched):
        return LossForm(LossKind.ROWS, str(state))
    return _COUPLED if isinstance(state, Head) and state.couples else _Forms(split).of_terms(value)


def _form_of_outputs(outputs: tuple[tuple[str, LossForm], ...]) -> LossForm:
    """The form of a function: that of its only output, or one that has those of all outputs as its parts."""
    forms = tuple(form for _, form in outputs)
    if len(forms) == 1:
        return forms[0]
    return LossForm(LossKind.OUTPUTS, f"function with {len(forms)} outputs", parts=tuple(dict.fromkeys(forms)))


def scales(node: Node, factor: Value) -> bool:
    """Whether a node multiplies an operand by another, or divides it."""
    return node.name == "mul" or (node.name == "div" and factor is node.inputs[0])


class _Forms:
    """Finds the forms of the values of a loss."""

    def __init__(self, split: Split) -> None:
        self.reader, self.num_examples = split.reader, split.loss.num_examples
        self.examples = f"over {self.num_examples} example{'' if self.num_examples == 1 else 's'}"

    def _over(self, selection: int | None) -> str:
        """Words for what a sum is over: the examples, or rows that are selected from them."""
        if selection is None:
            return self.examples
        return f"over {selection} row{'' if selection == 1 else 's'} of {self.num_examples} examples"

    def of_terms(self, value: Value) -> LossForm:
        """The form of a value, from those of the terms that it adds up."""
        terms: dict[LossForm, None] = {}
        of_parameters = False
        for term in self._terms(value):
            if self.reader.state(term) == INVARIANT and not self.reader.depends_on_batch(term):
                of_parameters = of_parameters or self.reader.moves(term)
            else:
                terms[self._of_term(term)] = None
        first, *others = terms
        words = " plus ".join(term.words for term in terms)
        form = LossForm(LossKind.SEVERAL, words, parts=tuple(terms)) if others else first
        if not of_parameters:
            return form
        return dataclasses.replace(form, words=f"{words}, plus a term of the parameters", adds_parameters=True)

    def _terms(self, value: Value) -> Iterator[Value]:
        """The terms that a value adds up, through factors and casts. Without recursion: there may be thousands."""
        seen: set[Value] = set()
        pending = [value]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            node, is_head = value.node, isinstance(self.reader.state(value), Head)
            inputs = [] if node is None else node.inputs
            factors = [operand for operand in inputs if self.reader.depends_on_batch(operand)]
            if node is not None and node.name in ("add", "add_any", "sub"):
                pending.extend(reversed(inputs))
            elif node is not None and is_head and node.name in _UNCHANGED:
                pending.append(inputs[0])
            elif node is not None and is_head and len(factors) == 1 and scales(node, factors[0]):
                pending.append(factors[0])
            else:
                yield value

    def _of_term(self, value: Value) -> LossForm:
        state, node = self.reader.state(value), value.node
        if state == SUMMED:
            return self._of_sum(value)
        if node is None or state == INVARIANT or isinstance(state, Batched):
            of_what = "the parameters and of some data" if self.reader.moves(value) else "the data alone"
            return LossForm(LossKind.OF_DATA, f"a function of {of_what}")
        if node.name in _FUNCTIONS:
            inside = self.of_terms(node.inputs[0])
            return LossForm(LossKind.FUNCTION, f"{_FUNCTIONS[node.name]} of a {inside.words}", parts=(inside,))
        if node.name == "div" and all(self.reader.depends_on_batch(operand) for operand in node.inputs):
            return _RATIO
        below = sources([value], lambda value: not isinstance(self.reader.state(value), Head))
        number = sum(self.reader.state(value) == SUMMED for value in below)
        sums = f"{number} sums" if number > 1 else "a sum"
        return LossForm(LossKind.FUNCTION, f"function of {sums} {self.examples}")

    def _of_sum(self, value: Value) -> LossForm:
        """A sum; or a mean, if it is divided by the number of examples; or a ratio, if by a value of the batch."""
        pending, divided, selection = [value], False, self.reader.selection(value)
        over, count = self._over(selection), self.reader.count(selection)
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            node = value.node
            if node is None or value in seen:
                continue
            seen.add(value)
            if node.name in ("mul", "div"):
                for operand in (each for each in node.inputs if self.reader.state(each) == INVARIANT):
                    if self.reader.depends_on_batch(operand):
                        return _RATIO
                    divided = divided or self._grows_with_batch(node, operand, count)
            if self.reader.state(value) == SUMMED or node.name in ("mul", "div") or node.name in _UNCHANGED:
                pending.extend(operand for operand in node.inputs if self.reader.state(operand) != INVARIANT)
        kind = LossKind.MEAN if divided else LossKind.SUM
        return LossForm(kind, f"{kind} {over}", selection)

    def _grows_with_batch(self, node: Node, operand: Value, count: int) -> bool:
        known = constant_value(self.reader, operand)
        if known is None or known.size == 0 or known.flat[0] == 0 or (known != known.flat[0]).any():
            return False
        number = abs(float(known.flat[0].real))
        divisor = number if node.name == "div" else 1 / number
        return divisor >= count and abs(divisor / count % 1 - 0.5) > 0.5 - 1e-4
