"""The pages of docs/: their commands compose, their links lead somewhere, their messages exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from scripts.cp import cp
from scripts.new import new

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# The other pages' commands are composed by the tests of what they describe.
PAGES = [
    "index",
    "tutorial",
    "concepts",
    "troubleshooting",
    *(f"coming_from/{p.stem}" for p in DOCS.glob("coming_from/*.md")),
]


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return what the pages show after `train`, in blocks and in tables, that picks something."""
    found = set()
    for name in PAGES:
        for line in re.findall(r"(?:^|`|&& )train ([^`\n]*=[^`\n]*)", page(name), re.M):
            found.add(line.split("   ")[0].strip())
    return sorted(found)


@pytest.mark.parametrize("command", [pytest.param(c, id=c) for c in commands()])
def test_a_command_composes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--config-dir conf" in command:  # what the pages have made before
        new([str(tmp_path / "flowers")])
        monkeypatch.chdir(tmp_path / "flowers")
        cp(["experiment/resnet18", "conf/experiment/pets.yaml"])
    words = [word for word in shlex.split(command) if word not in ("-m", "...", "--cfg", "job")]
    if "accumulate_grad_batches=4" in words:  # shown as a mistake
        with pytest.raises(ConfigError, match=r"trainer\.gradient_accumulation_steps"):
            compose(["experiment=resnet18", *words])
        return
    base = [] if "experiment=" in command else ["experiment=resnet18"]
    parse(compose([*base, *words]).config)


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in DOCS.rglob("*.md")])
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_site_lists_every_page() -> None:
    listed = re.findall(
        r"[\w/]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    )
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_the_messages_are_those_of_the_code() -> None:
    packages = ("conf", "data", "models", "trainer", "callbacks", "scripts")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    # Literals next to each other are one text.
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(p.read_text(encoding="utf-8") for p in files))
    shown = re.findall(r"^\| `([^`]+)` \|", page("troubleshooting"), re.M)
    assert len(shown) > 20
    assert [message for message in shown if message not in text] == []


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", page("concepts"))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
