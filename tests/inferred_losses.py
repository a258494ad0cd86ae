"""The table of losses whose reduction is inferred. A new row inherits every test that is parametrized by it."""

from inferred_aux import AUX
from inferred_case import NUM_EXAMPLES, Case
from inferred_coupled import COUPLED
from inferred_layouts import LAYOUTS
from inferred_programs import PROGRAMS
from inferred_selections import SELECTIONS
from inferred_separable import SEPARABLE

INFERRED: list[Case] = [*SEPARABLE, *LAYOUTS, *COUPLED, *PROGRAMS, *SELECTIONS, *AUX]

__all__ = ["INFERRED", "NUM_EXAMPLES", "Case"]
