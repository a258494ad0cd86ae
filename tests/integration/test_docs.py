"""Every Python block of the documentation runs, in the order of its page."""

import pathlib
import re

import jax
import pytest

import anybatch as ab

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of JAX
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)


def test_the_blocks_are_found():
    assert len(blocks(ROOT / "README.md")) == 4
    assert len(blocks(ROOT / "docs" / "guide.md")) >= 7


def test_the_api_page_lists_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in ab.__all__ if not re.search(rf"\banybatch\.{name}\b", text)] == []


def test_how_it_works_names_files_that_exist():
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / "anybatch" / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
