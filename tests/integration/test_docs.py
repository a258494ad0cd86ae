"""Every Python block of the documentation runs, in the order of its page; the reference is complete; links work.

The notebooks in docs/tutorials run when the documentation is built (`make docs`).
"""

import inspect
import pathlib
import re

import jax
import pytest

import anybatch as ab

pytestmark = pytest.mark.every_set

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.relative_to(DOCS).parts),
]
WIDTH = 90  # characters of code that fit into the column of the theme


def name_of(page):
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of JAX
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)


def test_the_blocks_are_found():
    assert len(blocks(ROOT / "README.md")) >= 1
    assert len(blocks(DOCS / "guide.md")) >= 7
    assert len(blocks(DOCS / "howto" / "nnx.md")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_fits_the_width_of_a_page(page):
    """So that nobody has to scroll to the right. Blocks for Sphinx itself are not shown."""
    fence, language, wide = None, "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        opened = re.match(r"^(`{3,})(.*)$", line)
        if fence is None and opened:
            fence, language = opened[1], opened[2].strip()
        elif line.strip() == fence:
            fence = None
        elif fence and (not language.startswith("{") or "code-cell" in language) and len(line) > WIDTH:
            wide.append(f"{number}: {line}")
    assert wide == []


def public_names():
    """The names that a user may import: those of the package, and those of its public modules."""
    yield from (f"anybatch.{name}" for name in ab.__all__ if name in ab._HOMES)
    for module in map(ab.__getattr__, ab._MODULES):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
        ]
        yield from (f"{module.__name__}.{name}" for name in names)


def test_the_reference_has_a_page_for_every_public_name():
    listed = set(re.findall(r"^   (anybatch\.[\w.]+)$", (DOCS / "api" / "index.md").read_text(), re.MULTILINE))
    assert [name for name in public_names() if name not in listed] == []
    assert "anybatch.recipes.microbatched_grads" in listed and "anybatch.privacy.dp_sgd" in listed


def test_how_it_works_names_files_that_exist():
    text = (DOCS / "how_it_works.md").read_text()
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / "anybatch" / path).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)"', text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"version: {ab.__version__}\n" in text
