"""JAX's insides are known to one folder alone: what moves in JAX is repaired there, and breaks no import."""

import pathlib
import re
import subprocess
import sys

import pytest

import anybatch as ab
from anybatch.jaxprs import versions

PACKAGE = pathlib.Path(ab.__file__).parent
INSIDES = re.compile(
    r"jax\._\w|jax\.extend|\bimport _src\b|getattr\([^)]*[\"']jaxpr[\"']|hasattr\([^)]*[\"'](jaxpr|eqns)"
)
PUBLIC = re.compile(r"jax\.__\w+__")  # jax.__version__, jax.__file__


def lines_with_insides(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if INSIDES.search(PUBLIC.sub("", line)):
            yield f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"


def files():
    return [path for path in PACKAGE.rglob("*.py") if "courses" not in path.parts]


def test_nothing_else_knows_the_insides_of_jax():
    found = [line for path in files() if path.parent.name != "jaxprs" for line in lines_with_insides(path)]
    assert not found


def test_the_lines_are_found():
    """The control."""
    found = [line for path in files() if path.parent.name == "jaxprs" for line in lines_with_insides(path)]
    assert any("from jax.extend import core" in line for line in found)
    assert any('getattr(jaxpr, "jaxpr", jaxpr)' in line for line in found)
    assert any("jax._src" in line for line in found)


@pytest.mark.parametrize("module", ["versions", "interpreter", "tracing", "avals", "graph", "in_place"])
def test_importing_it_loads_no_insides_that_take_time(module):
    """`jax.extend` brings Pallas with it, which is loaded when a loss is first traced."""
    program = f"import sys, jax, anybatch.jaxprs.{module}; print('jax.extend' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_the_insides_are_loaded_where_they_are_used():
    """The control."""
    program = "import sys, jax, anybatch.jaxprs.versions as v; v.is_eager(); print('jax.extend' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_a_jax_that_has_moved_its_insides_is_an_error_that_says_so():
    with pytest.raises(ab.NotAvailableError, match=r"jax\._src\.xla_bridge\.not_there, is not available(.|\n)*pip ins"):
        versions._internal("xla_bridge", "not_there")
    with pytest.raises(ab.NotAvailableError, match=r"jax\._src\.not_there\.name"):
        versions._internal("not_there", "name")
