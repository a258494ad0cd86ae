"""The rules: for each primitive, how it treats the batch axis.

Open `elementwise.py` first, the simplest rules; each of the other modules has a group of primitives. Importing a module
adds its rules to `RULES`. `register_rule` adds a rule for a primitive of the user's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from anybatch.errors import InputError
from anybatch.jaxprs.graph import Node
from anybatch.reading.reader import RULES, Reader, Rulebook, RuleResult
from anybatch.reading.rules import control, derivatives, elementwise, indexing, kernels, reductions
from anybatch.reading.states import SUMMED, Batched, NotRowwise, State, common_rows, refuse_sums

# Importing a module adds its rules to the table.
MODULES = (control, derivatives, elementwise, indexing, kernels, reductions)
RULEBOOK = Rulebook(RULES, derivatives.has_linear_backward)

UserRule = Callable[[Sequence[int | None], dict[str, Any]], Sequence[int | str]]
Resize = Callable[[dict[str, Any], Sequence[int | None], int], dict[str, Any]]

# The rules that users have registered, by primitive. They are part of a plan's key, since they may change the plan.
USER_RULES: dict[str, tuple[UserRule, Resize | None]] = {}


def register_rule(primitive: Any, rule: UserRule, *, resize: Resize | None = None) -> None:
    """Teaches anybatch how a primitive of your own treats the batch axis.

    A primitive without a rule is taken to couple examples: the gradient is still exact, but everything after it is
    computed from the full batch. A rule is like a batching rule of `jax.vmap`: it is told along which axis of each
    operand the examples are, and returns where they are in the results. A rule is not checked. If it says that
    examples stay apart where they do not, gradients are wrong; `anybatch.verify` finds that out.

    >>> import anybatch as ab
    >>> def rule(axes, params):
    ...     if axes[0] != 0:
    ...         raise ab.NotRowwise("my_attention takes its examples along axis 0")
    ...     return [0]
    >>> ab.register_rule("my_attention", rule)

    Args:
      primitive: the primitive, or its name.
      rule: a function `rule(axes, params)`. `axes` has for each operand the axis of the examples, or None if the
        operand is invariant (a microbatch then gets all of it). `params` are the parameters of the equation. It
        returns for each result the axis of the examples, or `"sum"` if the result is a sum over them. It raises
        `anybatch.NotRowwise(why)` if the equation cannot be computed per microbatch.
      resize: a function `resize(params, axes, num_rows)` that returns the parameters for `num_rows` rows along
        the axes of the examples. It is needed if the parameters hold shapes.

    Raises:
      InputError: if `primitive` or `rule` has the wrong type.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not callable(rule):
        raise InputError(
            "register_rule needs a primitive, or its name, and a function",
            given=f"primitive={primitive!r} and rule={rule!r}",
            remedy='For example: anybatch.register_rule("my_attention", lambda axes, params: [0]).',
        )

    def entered(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
        refuse_sums(states)
        axes = [state.axis if isinstance(state, Batched) else None for state in states]
        rows = common_rows([state.at(0) if isinstance(state, Batched) else state for state in states])
        found = [rows.at(axis) if isinstance(axis, int) else SUMMED for axis in rule(axes, dict(node.params))]
        if len(found) != len(node.outputs):
            raise NotRowwise(f"its rule names {len(found)} results of {len(node.outputs)}")
        for value, state in zip(node.outputs, found, strict=True):
            if isinstance(state, Batched):
                has = value.shape[state.axis] if state.axis < value.ndim else None
                if has != rows.length(reader.num_examples):
                    raise NotRowwise(f"its rule says that a result of shape {value.shape} has {state}")
        if resize is None:
            return RuleResult(found)
        return RuleResult(found, params=lambda size: resize(dict(node.params), axes, rows.length(size)))

    RULES[name] = entered
    USER_RULES[name] = (rule, resize)
