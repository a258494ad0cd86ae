"""The floors of the house: imports only go down."""

import ast
import pathlib
import subprocess
import sys

import pytest

import anybatch

PACKAGE = pathlib.Path(anybatch.__file__).parent
COURSES = PACKAGE / "learn" / "courses"  # no modules: what learners read and write

# A module may import those of lower floors, and those before it in the list of its own floor.
FLOORS = [
    [
        *(
            "version",
            "errors",
            "files",
            "checks",
            "trees",
            "updates",
            "compat",
            "memory",
            "placement",
            "hints",
            "mesh_settings",
        ),
        *("hlo", "collectives"),
    ],
    ["batch", "arguments", "loss", "auxiliary", "gradient_noise", "process_rows", "distributed"],
    [
        *("reading", "reading.states", "reading.graph", "reading.source", "reading.reader", "reading.positions"),
        *("reading.selection", "reading.evaluation", "reading.constants", "reading.rules", "reading.rules.table"),
        *("reading.rules.elementwise", "reading.rules.shapes", "reading.rules.ordering", "reading.rules.reductions"),
        *("reading.rules.indexing", "reading.rules.random", "reading.rules.algebra", "reading.rules.derivatives"),
        *("reading.rules.control", "reading.rules.kernels", "reading.rulebook"),
        *("reading.split", "reading.loss_reading", "reading.kinds", "reading.units", "reading.written"),
        "reading.report",
    ],
    [
        *("factors", "factors.dtypes", "factors.evaluation", "factors.terms", "factors.recognition", "factors.choice"),
        *("factors.squares", "factors.sums", "factors.gradients"),
        *(
            "routes",
            "routes.parts",
            "routes.outputs",
            "routes.in_place",
            "routes.terms",
            "routes.references",
            "routes.blocks",
            "routes.squares",
            "routes.full",
            "routes.scan",
        ),
        *(
            "routes.passes",
            "routes.split_passes",
            "routes.groups",
            "routes.joining",
            "routes.spread",
            "routes.example_results",
            "routes.each_example",
        ),
    ],
    [
        *(
            "settings",
            "example_settings",
            "modules",
            "programs",
            "limits",
            "field",
            "computation",
            "example_computation",
            "planning",
            "planning.sizes",
            "planning.store",
        ),
        *("planning.fingerprint", "planning.measure", "planning.budget", "planning.picture", "planning.search"),
        *("planning.report", "planning.explanation", "planning.planner", "planning.running"),
    ],
    [
        "gradient",
        "per_example",
        "clipping",
        "noise_scale",
        "plan",
        "read",
        "widening",
        "comparison",
        "diagnosis",
        "verify",
    ],
    [
        *("privacy.numbers", "privacy.accounting", "privacy.noise", "privacy.keys", "privacy.sampling"),
        *("privacy.refusals", "privacy.mechanism", "privacy.training", "privacy"),
        *("training.batches", "training.sources", "training.feed", "training.stored_arrays"),
        *("training.checkpoint_folder", "training.checkpoints", "training.log", "training.state", "training.arrays"),
        *("training.kinds", "training.update", "training.fitting", "training.step", "training.stopping"),
        *("training.progress", "training.throughput", "training.rows", "training.run", "training.loop", "training"),
        *("recipes", "__init__"),
    ],
    [
        *("report.series", "report.drawing", "report.figures", "report.tables", "report.page", "report"),
        *("language.text", "language.gpt", "language.config", "language.folder", "language.job", "language"),
        *("demo", "problem", "doctor", "launch", "commands"),
    ],
    [
        *("learn.program", "learn.check", "learn.rules", "learn", "learn.verdict"),
        *("learn.runner", "learn.runner.wire", "learn.runner.influence", "learn.runner.work"),
        *("learn.runner.evidence", "learn.runner.seccomp"),
        *("learn.runner.landlock", "learn.runner.namespaces"),
        *("learn.runner.refusals", "learn.runner.isolation", "learn.runner.nursery"),
        *("learn.runner.endings", "learn.runner.children", "learn.runner.submissions"),
        *("learn.catalogue", "learn.asking", "learn.values", "learn.findings", "learn.grading", "learn.progress"),
        *("learn.terminal", "learn.terminal.pages", "learn.terminal.keys", "learn.terminal.watch"),
        *("learn.terminal.commands", "learn.terminal.development", "learn.cli", "cli", "__main__"),
    ],
]
ORDER = [module for floor in FLOORS for module in floor]


def modules():
    paths = sorted(path for path in PACKAGE.rglob("*.py") if COURSES not in path.parents)
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return list(zip(names, paths, strict=True))


def imports_of(path):
    """The modules of the package that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            name = "__init__" if name == "anybatch" and isinstance(node, ast.Import) else name.removeprefix("anybatch.")
            if name in ORDER:
                yield name


def test_every_module_has_a_floor():
    assert sorted(name for name, _ in modules()) == sorted(ORDER)


@pytest.mark.parametrize("name, path", modules(), ids=[name for name, _ in modules()])
def test_imports_only_go_down(name, path):
    upwards = [other for other in imports_of(path) if ORDER.index(other) >= ORDER.index(name)]
    assert not upwards


def test_the_imports_are_seen():
    """The control."""
    found = set(imports_of(PACKAGE / "routes" / "scan.py"))
    assert {"routes.in_place", "batch", "loss"} <= found


def test_only_one_module_knows_versions():
    offenders = [name for name, path in modules() if "jax.__version__" in path.read_text()]
    assert offenders == ["compat"]


def test_the_core_needs_jax_and_numpy_only():
    """Everything else is imported where it is used."""
    program = "import sys, anybatch; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    extras = {"optax", "flax", "orbax", "rich", "typer", "matplotlib", "jinja2", "dp_accounting", "chex", "grain"}
    assert not extras & set(loaded)
    assert {"jax", "numpy"} <= set(loaded)
