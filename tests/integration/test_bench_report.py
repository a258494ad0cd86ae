"""The tables in the documentation and the README are what the results of the benchmarks say."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def report(monkeypatch):
    """benchmarks/report.py, which draws nothing here: plots depend on the version of matplotlib."""
    spec = importlib.util.spec_from_file_location("bench_report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.pictures

    def shown(name, *args, **kwargs):
        assert all((module.TABLES / f"{name}_{theme}.svg").exists() for theme in module.INK)
        return drawn(name, kwargs["alt"])

    monkeypatch.setattr(module, "plot", shown)
    return module


def test_the_tables_are_what_the_results_say(report):
    for path, text in report.made().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run `make bench-report`"


def test_a_table_that_is_not_what_the_results_say_is_found(report, monkeypatch):
    changed = report.load("correctness")
    changed["rows"][0]["outcome"] = changed["rows"][0]["unchanged"] = "wrong"
    changed["rows"][0]["difference"] = changed["rows"][0]["unchanged_difference"] = 0.5
    load = report.load
    monkeypatch.setattr(report, "load", lambda name: changed if name == "correctness" else load(name))
    files = report.made()
    assert files[report.README] != report.README.read_text()
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 1


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path):
    results = json.loads(path.read_text())
    assert results["command"].startswith("python benchmarks/") and results["device"] and results["rows"]
    assert {"python", "jax"} <= results["versions"].keys()


def test_every_table_is_on_a_page(report):
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert [name for name in report.SECTIONS if f"results/{name}.md" not in pages] == []
