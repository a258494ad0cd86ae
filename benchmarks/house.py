"""How large is the code? Counts the modules, lines, parameters and complexity of the package.

    python benchmarks/house.py            # this checkout
    python benchmarks/house.py ../other   # another one, to compare

Takes three seconds and needs no JAX. Courses are left out: they are exercises, not modules.
"""

import ast
import collections
import pathlib
import statistics
import sys


def complexity(function: ast.AST) -> int:
    """McCabe's complexity: the number of branches, plus one. Nested functions are counted separately."""
    total, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(
            node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
        ):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        nodes += ast.iter_child_nodes(node)
    return total


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The parameters of a function, without `self` and `cls`."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def imported(tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "anybatch":
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}".removeprefix("anybatch.")
                found.add(full_name if full_name in modules else node.module.removeprefix("anybatch").lstrip("."))
    return found & modules


def measure(root: pathlib.Path) -> dict[str, str]:
    """The rows of the table: name to figures."""
    package = root / "anybatch"
    paths = [path for path in package.rglob("*.py") if "courses" not in path.parts]
    name = {path: ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    trees = {name[path]: ast.parse(path.read_text()) for path in paths}
    lines = {name[path]: len(path.read_text().splitlines()) for path in paths}
    code = {name[path] for path in paths if path.name != "__init__.py"}
    importers = collections.Counter(
        other for each, tree in trees.items() for other in imported(tree, set(trees)) - {each}
    )
    functions = [
        (f"{module}.{node.name}", node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    public = {"__init__"}
    wide = [(num_parameters(node), each) for each, node in functions if num_parameters(node) > 8]
    hidden = [
        each for each in wide if each[1].rpartition(".")[2].startswith("_") or each[1].endswith(("__init__", ".of"))
    ]
    winding = sorted(((complexity(node), each) for each, node in functions), reverse=True)
    tests = [path for path in (root / "tests").rglob("*.py")]
    return {
        "modules, with __init__.py; lines": f"{len(trees)} ({len(code)} without __init__.py); {sum(lines.values()):,}",
        ".py at the top of the package": str(len(list(package.glob("*.py")))),
        "modules with one importer": str(sum(importers[each] == 1 for each in code - public)),
        "modules under 100 lines": str(sum(lines[each] < 100 for each in code)),
        "longest module; median": f"{max(lines.values())}; {statistics.median(lines[each] for each in code):g}",
        "functions with more than 8 parameters": f"{len(wide)}, {len(hidden)} of them private (up to {max(wide)[0]})",
        "functions of complexity over 15": f"{sum(found > 15 for found, _ in winding)} (up to {winding[0][0]}: "
        f"{winding[0][1]})",
        "test files; folders": f"{len([path for path in tests if path.name.startswith('test_')])}; "
        f"{len({path.parent for path in tests})}",
    }


if __name__ == "__main__":
    here = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]
    for what, found in measure(here).items():
        print(f"{what:40} {found}")
