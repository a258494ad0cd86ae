"""`anybatch learn`: practice with JAX's own primitives, graded on value, memory and collectives.

What an author of exercises needs is here: a `Check` and its parts, and the rules on programs.
"""

from anybatch.learn.check import (
    Array,
    Case,
    Check,
    Collectives,
    Differences,
    Mistake,
    Operation,
    Program,
    Raises,
    Response,
    Same,
    Slope,
)
from anybatch.learn.rules import (
    carries,
    computes_in,
    forbids,
    matters,
    needs,
    one_microbatch,
    other_numbers,
    scans,
    stacks_less_than,
)

__all__ = [
    "Array",
    "Case",
    "Check",
    "Collectives",
    "Differences",
    "Mistake",
    "Operation",
    "Program",
    "Raises",
    "Response",
    "Same",
    "Slope",
    "carries",
    "computes_in",
    "forbids",
    "matters",
    "needs",
    "one_microbatch",
    "other_numbers",
    "scans",
    "stacks_less_than",
]
