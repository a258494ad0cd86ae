"""The lines that readings and errors name."""

import sys
import types

import jax.numpy as jnp
import pytest

import anybatch as ab

CELL = "/tmp/ipykernel_1/2.py"


def coupled_loss(file):
    """A loss that looks across examples, compiled as if it were in this file."""
    names = {"jnp": jnp}
    exec(compile("def loss(w, x):\n    z = x @ w\n    return jnp.mean((z - z.mean()) ** 3)\n", file, "exec"), names)
    return names["loss"]


@pytest.fixture
def shell(monkeypatch):
    """IPython, as far as it is asked: it knows its cells by their temporary files."""
    compiler = types.SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == CELL else None)
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", module)


def test_a_line_of_a_notebook_is_named_by_its_cell(shell):
    reading = ab.read(coupled_loss(CELL), jnp.ones(3), jnp.ones((8, 3)))
    assert "In[3]:3" in str(reading) and "ipykernel" not in str(reading)
    other = ab.read(coupled_loss("/home/me/model.py"), jnp.ones(3), jnp.ones((8, 3)))
    assert "/home/me/model.py:3" in str(other)


def test_without_a_notebook_the_file_is_named():
    assert CELL in str(ab.read(coupled_loss(CELL), jnp.ones(3), jnp.ones((8, 3))))
