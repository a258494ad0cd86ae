"""The table of losses whose reduction is inferred. A new row inherits every test that is parametrized by it."""

from cases.read_aux import AUX
from cases.read_case import NUM_EXAMPLES, Case
from cases.read_coupled import COUPLED
from cases.read_layouts import LAYOUTS
from cases.read_programs import PROGRAMS
from cases.read_selections import SELECTIONS
from cases.read_separable import SEPARABLE

INFERRED: list[Case] = [*SEPARABLE, *LAYOUTS, *COUPLED, *PROGRAMS, *SELECTIONS, *AUX]

__all__ = ["INFERRED", "NUM_EXAMPLES", "Case"]
