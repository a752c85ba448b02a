"""The documents are in step with the code: generated pages, links, and the names that a reader types."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = runpy.run_path(str(ROOT / "docs" / "pages.py"))["PAGES"]
MARKDOWN = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if ".venv" not in p.parts)


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run make docs"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in MARKDOWN:
        for name in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert name in targets, f"{page.name} names make {name}"


def test_no_registry_address_and_no_path_of_a_machine() -> None:
    hosts = ("pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "deb." + "debian.org")
    locks = [path for path in ROOT.glob("requirements/**/*") if path.is_file()]
    for path in (*MARKDOWN, *locks, *ROOT.glob("scripts/*"), ROOT / "Makefile", ROOT / ".ci/run"):
        text = path.read_text()
        assert not [host for host in hosts if host in text], path
