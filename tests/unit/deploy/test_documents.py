"""Links between documents resolve."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
_HEADING = re.compile(r"#{1,6} +(.+?) *#*")


def documents() -> list[Path]:
    """Return the tracked and new Markdown files, without those that are data of tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def prose(text: str) -> Iterator[str]:
    """Yield the lines outside of fenced code."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading: lower case, blanks as hyphens, no punctuation."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings; the second of a name ends in -1, as on GitHub."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    for line in prose(text):
        if heading := _HEADING.fullmatch(line):
            anchor = anchor_of(heading[1])
            count = seen.get(anchor, 0)
            seen[anchor] = count + 1
            found.add(f"{anchor}-{count}" if count else anchor)
    return found


def broken_links(document: Path) -> list[str]:
    """Return the relative links of a document that lead to no file, or to no heading of a document."""
    # A link may be broken over lines within its text, never within its target.
    links = _LINK.findall(re.sub(r"`[^`]*`", "", "\n".join(prose(document.read_text("utf-8")))))
    broken = []
    for path, anchor in links:
        # Fragments of the changelog become part of a file at the top.
        base = ROOT if document.parent.name == "changelog.d" else document.parent
        target = (base / path).resolve() if path else document
        if not target.exists():
            broken.append(f"{path}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text("utf-8"))):
            broken.append(f"{path}#{anchor}: no such heading")
    return broken


def test_relative_links_lead_to_files_and_headings() -> None:
    broken = {str(path.relative_to(ROOT)): links for path in documents() if (links := broken_links(path))}
    assert broken == {}


def test_broken_links_are_told(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# A title: `code`, and (more)\n## Twice\n## Twice\n```\n# none\n```\n"
    )
    document = tmp_path / "page.md"
    document.write_text(
        "# Here\n[a](other.md) [b](other.md#a-title-code-and-more) [c](#here) [d](https://example.org/x.md)\n"
        "[e](other.md#twice-1) `[code](none.md)`\n```\n[fenced](none.md)\n```\n"
        "[f](none.md) [g](other.md#none) [over\nlines](other.md#twice-2) [h](#there)\n"
    )
    assert broken_links(document) == [
        "none.md: no such file",
        "other.md#none: no such heading",
        "other.md#twice-2: no such heading",
        "#there: no such heading",
    ]
