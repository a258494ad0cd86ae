"""Says in plain words what a loss is over its examples."""

from collections.abc import Iterator

from anybatch.reading.constants import constant_value
from anybatch.reading.graph import Node, Value
from anybatch.reading.split import Split
from anybatch.reading.states import SUM, WHOLE, Mixed, Rows

_UNCHANGED = frozenset(
    "convert_element_type reshape squeeze broadcast_in_dim copy copy_p neg name transpose reduce_precision".split()
)
_FUNCTIONS = {"sqrt": "square root", "log": "logarithm", "exp": "exponential", "rsqrt": "inverse square root"}


def kind_of(split: Split) -> str:
    """What the loss is over its examples: "mean over 64 examples", "ratio of sums", "couples examples", ..."""
    loss = split.graph.outputs[0]
    if loss.is_constant or not split.reader.uses_batch[loss]:
        return "does not depend on the batch"
    state = split.reader.state(loss)
    if isinstance(state, Mixed) and state.couples:
        return "couples examples"
    return _Words(split).of_terms(loss)


def _scales(node: Node, factor: Value) -> bool:
    return node.name == "mul" or (node.name == "div" and factor is node.inputs[0])


class _Words:
    def __init__(self, split: Split) -> None:
        self.reader, self.num_examples = split.reader, split.loss.num_examples
        self.examples = f"over {self.num_examples} example{'' if self.num_examples == 1 else 's'}"

    def _over(self, value: Value) -> str:
        """What a sum is over: the examples, or rows that are selected from them."""
        selection = self.reader.selection(value)
        if selection is None:
            return self.examples
        return f"over {selection} row{'' if selection == 1 else 's'} of {self.num_examples} examples"

    def of_terms(self, value: Value) -> str:
        """The terms that a value is a sum of."""
        terms: dict[str, None] = {}
        of_parameters = False
        for term in self._terms(value):
            if self.reader.state(term) == WHOLE and not self._uses_batch(term):
                of_parameters = of_parameters or self.reader.moves(term)
            else:
                terms[self._of_term(term)] = None
        described = " plus ".join(terms)
        return f"{described}, plus a term of the parameters" if of_parameters else described

    def _terms(self, value: Value) -> Iterator[Value]:
        """What a value adds up, through factors and casts. Without recursion: a loss may add up thousands of terms."""
        seen: set[Value] = set()
        pending = [value]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            node = None if value.is_constant else value.node
            is_mixed = isinstance(self.reader.state(value), Mixed)
            factors = [] if node is None else [operand for operand in node.inputs if self._uses_batch(operand)]
            if node is not None and node.name in ("add", "add_any", "sub"):
                pending.extend(reversed(node.inputs))
            elif node is not None and is_mixed and node.name in _UNCHANGED:
                pending.append(node.inputs[0])
            elif node is not None and is_mixed and len(factors) == 1 and _scales(node, factors[0]):
                pending.append(factors[0])
            else:
                yield value

    def _of_term(self, value: Value) -> str:
        state, node = self.reader.state(value), value.node
        if state == SUM:
            return self._of_sum(value)
        if node is None or state == WHOLE or isinstance(state, Rows):
            return (
                f"a function of {'the parameters and of some data' if self.reader.moves(value) else 'the data alone'}"
            )
        if node.name in _FUNCTIONS:
            return f"{_FUNCTIONS[node.name]} of a {self.of_terms(node.inputs[0])}"
        if node.name == "div" and all(self._uses_batch(operand) for operand in node.inputs):
            return "ratio of sums"
        sums = self._sums_below(value)
        return (
            f"function of {len(sums)} sums {self.examples}" if len(sums) > 1 else f"function of a sum {self.examples}"
        )

    def _of_sum(self, value: Value) -> str:
        """A sum: is it divided by a number that grows with the batch, or by one that the batch itself gives?"""
        pending, divided, over = [value], False, self._over(value)
        count = self.reader.count(self.reader.selection(value))
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            node = None if value.is_constant else value.node
            if node is None or value in seen:
                continue
            seen.add(value)
            if node.name in ("mul", "div"):
                whole = [operand for operand in node.inputs if self.reader.state(operand) == WHOLE]
                for operand in whole:
                    if self._uses_batch(operand):
                        return "ratio of sums"
                    divided = divided or self._grows_with_batch(node, operand, count)
            if self.reader.state(value) == SUM or node.name in ("mul", "div") or node.name in _UNCHANGED:
                pending.extend(operand for operand in node.inputs if self.reader.state(operand) != WHOLE)
        return f"mean {over}" if divided else f"sum {over}"

    def _grows_with_batch(self, node: Node, operand: Value, count: int) -> bool:
        known = constant_value(self.reader, operand)
        if known is None or known.size == 0 or known.flat[0] == 0 or (known != known.flat[0]).any():
            return False
        number = abs(float(known.flat[0].real))
        divisor = number if node.name == "div" else 1 / number
        return divisor >= count and abs(divisor / count % 1 - 0.5) > 0.5 - 1e-4

    def _sums_below(self, value: Value) -> set[Value]:
        found: set[Value] = set()
        seen: set[Value] = set()
        pending = [value]
        while pending:
            value = pending.pop()
            if value.is_constant or value in seen:
                continue
            seen.add(value)
            if self.reader.state(value) == SUM:
                found.add(value)
            elif value.node is not None and isinstance(self.reader.state(value), Mixed):
                pending.extend(value.node.inputs)
        return found

    def _uses_batch(self, value: Value) -> bool:
        return not value.is_constant and self.reader.uses_batch[value]
