"""The rooms of the package: which folder may import which. The table is the picture in CONTRIBUTING.md."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import anybatch

pytestmark = pytest.mark.every_set

PACKAGE = pathlib.Path(anybatch.__file__).parent
COURSES = PACKAGE / "learn" / "courses"  # no modules: what learners read and write

# From the bottom up: a folder may import those above it in this list, and nothing else of the package.
FOLDERS = [
    "errors",
    "jaxprs",
    "call",
    "reading",
    "mesh",
    "planning",
    "gradients",
    "per_example gradient_noise",
    "functions",
    "verification",
    "auditing",
    "collectives distributed recipes",
    "training privacy",
    "testing",
    "report demo",
    "learn",
    "cli",
]
ORDER = [name for line in FOLDERS for name in line.split()]
PUBLIC = {"__init__", "__main__", "errors", "recipes", "distributed", "collectives", "testing"}


def modules():
    paths = sorted(path for path in PACKAGE.rglob("*.py") if COURSES not in path.parents)
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


MODULES = modules()


def imports_of(path):
    """The modules of the package that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, name = name.partition(".")
            if package == "anybatch":
                yield name if name in MODULES else name.rpartition(".")[0] or "__init__"


def test_the_modules_at_the_top_are_public():
    assert {path.stem for path in PACKAGE.glob("*.py")} == PUBLIC


def test_every_folder_has_its_place_and_says_what_it_is():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders | (PUBLIC - {"__init__", "__main__"}) == set(ORDER)
    for path in PACKAGE.glob("*/__init__.py"):
        assert len(ast.get_docstring(ast.parse(path.read_text())) or "") > 80, path


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    """A folder imports those before it. The package itself, and `python -m anybatch`, may import everything."""
    here = name.partition(".")[0]
    if here in ("__init__", "__main__"):
        return
    there = {other.partition(".")[0] for other in imports_of(MODULES[name])} - {here, "__init__"}
    assert not [other for other in there if ORDER.index(other) > ORDER.index(here)]


def test_no_module_imports_itself_through_others():
    graph = {name: set(imports_of(path)) - {name, "__init__"} for name, path in MODULES.items() if name != "__init__"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_imports_are_seen():
    """The control."""
    assert {"call.loss", "reading.split"} <= set(imports_of(MODULES["gradients.declared"]))


def test_no_public_name_is_a_module_of_the_same_name():
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert modules & set(anybatch.__all__) == {"collectives", "distributed", "privacy", "recipes", "testing"}


def test_only_one_folder_knows_versions():
    offenders = [name for name, path in MODULES.items() if "jax.__version__" in path.read_text()]
    assert offenders == ["jaxprs.versions"]


def test_the_core_needs_jax_and_numpy_only():
    """Everything else is imported where it is used."""
    program = "import sys, anybatch; anybatch.grad; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    extras = {"optax", "flax", "orbax", "rich", "typer", "matplotlib", "jinja2", "dp_accounting", "chex", "grain"}
    assert not extras & set(loaded)
    assert {"jax", "numpy"} <= set(loaded)


def test_the_names_that_type_checkers_see_are_those_that_load():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.name, node.module.removeprefix("anybatch").lstrip("."))
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = set(anybatch._HOMES.items()) | {(name, "") for name in anybatch._MODULES}
    assert seen == loaded
    for name in anybatch.__all__:
        assert getattr(anybatch, name) is not None


def test_importing_the_package_imports_no_jax():
    program = "import sys, anybatch; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
