"""Ten questions of a new user: each is answered by a heading at most three clicks from the site's front page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
QUESTIONS = {
    "What do I gain against the run I have?": ("plan.md", "The comparison"),
    "My Trainer waits for images: what do I add?": ("howto-trainer.md", "My Trainer"),
    "Does my model work?": ("tables/model-support.md", "Which models are supported, and how far"),
    "How must my data look?": ("howto-data.md", "Formats"),
    "Are the gradients still right?": ("training-loop.md", "Is it exact for my model?"),
    "Does my 26B fit on 8 x 24 GiB, and what do I change if not?": ("howto-out-of-memory.md", "My memory error"),
    "What does Megatron need from the plan?": ("howto-megatron.md", "Megatron-Core"),
    "How sure is the step time?": ("costs.md", "How sure"),
    "What do I pass to vLLM?": ("howto-serve.md", "vLLM and SGLang"),
    "How do I resume on another number of ranks?": ("train.md", "Ranks, checkpoints, lost ranks"),
}


def clicks() -> dict[Path, int]:
    """Return how many links lead from the front page to each page."""
    found = {DOCS / "index.md": 0}
    for page in (waiting := list(found)):
        text = page.read_text(encoding="utf-8")
        targets = [page.parent / x for x in re.findall(r"\]\(([\w/.-]+\.md)(?:#[\w-]+)?\)", text)]
        if "{toctree}" in text:
            targets += [page.parent / f"{name}.md" for name in re.findall(r"^([\w-]+)$", text, re.M)]
        for target in (x.resolve() for x in targets):
            if target.exists() and target not in found:
                found[target] = found[page] + 1
                waiting.append(target)
    return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_of_a_new_user_is_answered_within_three_clicks(question: str) -> None:
    name, heading = QUESTIONS[question]
    page = (DOCS / name).resolve()
    assert clicks()[page] <= 3
    assert re.search(rf"^#+ {re.escape(heading)}$", page.read_text(encoding="utf-8"), re.M)


def test_every_page_is_found_from_the_front_page() -> None:
    assert {x.resolve() for x in DOCS.rglob("*.md")} == set(clicks())


def test_every_link_to_a_heading_of_another_page_leads_there() -> None:
    for page in DOCS.rglob("*.md"):
        for target, anchor in re.findall(r"\]\(([\w/.-]*\.md|)#([\w-]+)\)", page.read_text(encoding="utf-8")):
            text = ((page.parent / target) if target else page).read_text(encoding="utf-8")
            slugs = {
                re.sub(r"[^\w\- ]", "", x).strip().lower().replace(" ", "-")
                for x in re.findall(r"^#+ (.+)$", text, re.M)
            }
            assert anchor in slugs, f"{page.name} links to {target}#{anchor}"
