"""What the README shows is what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_experiment_is_shown_whole() -> None:
    shipped = (ROOT / "conf" / "experiment" / "resnet18.yaml").read_text()
    assert shipped in blocks("yaml")


def test_the_python_snippet_trains(capsys) -> None:
    snippet = next(block for block in blocks("python") if "trainer.fit()" in block)
    exec(compile(snippet, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0.9


def test_the_dockerfile_has_the_steps_of_the_readme() -> None:
    steps = re.findall(r"^RUN (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    shown = [step.replace(" --no-cache-dir", "").replace(" --no-cache", "") for step in steps]
    assert len(shown) == 2
    missing = [step for step in shown if step.replace("$TORCH_BACKEND", "cpu") not in README]
    assert missing == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []
