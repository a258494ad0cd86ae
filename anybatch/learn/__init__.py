"""`anybatch learn`: exercises on JAX's primitives, graded on value, traced program, memory and collectives.

This package exports what authors of exercises need: `Check` and its parts, and the rules for programs. To follow one
check, open `grading.py` first; the learner's code runs in `runner/`, and `terminal/` has the commands.
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
