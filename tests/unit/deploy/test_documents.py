"""Links between documents resolve; the map and the glossary name what is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT

GROUPS = ("catenary", "catenary_apps", "catenary_testing", "gateway")
SERVICES = ("services/engine", "services/router", "services/tokenizer")
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
_CODE = re.compile(r"`([^`]+)`")
_HEADING = re.compile(r"#{1,6} +(.+?) *#*")


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository, new ones too, relative to its top."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).is_file()]


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
    broken = {str(path): links for path in tracked("*.md") if (links := broken_links(ROOT / path))}
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


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables below a heading of the second level, without titles and rules."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def source_folders() -> set[str]:
    """Return the folders that the map must have: those at the top, services, and folders in them."""
    files = [file for file in tracked() if len(file.parts) > 1]
    tops = {file.parts[0] for file in files if not file.parts[0].startswith(".")}
    inner = {
        f"{group}/{file.relative_to(group).parts[0]}"
        for group in (*GROUPS, *SERVICES)
        for file in files
        if file.is_relative_to(group) and len(file.relative_to(group).parts) > 1
    }
    return (tops | inner | set(SERVICES)) - {"services"}


def test_the_map_has_every_folder_and_each_first_file_exists() -> None:
    rows = table_rows((ROOT / "docs" / "architecture.md").read_text("utf-8"), "Map")
    folders = [row[0].strip("`").rstrip("/") for row in rows]
    assert sorted(folders) == sorted(source_folders())
    first = [row[2].strip("`") for row in rows]
    assert [file for file in first if file and not (ROOT / file).is_file()] == []


def test_the_glossary_names_places_and_messages_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    contract = "\n".join(
        file.read_text("utf-8") for file in sorted((ROOT / "protos" / "catenary" / "v1").glob("*.proto"))
    )
    known = set(re.findall(r"(?:message|service|enum) (\w+)", contract))
    fields = set(re.findall(r"(\w+) = \d+;|rpc (\w+)", contract))
    names = known | {name for pair in fields for name in pair if name}
    sections = ("Requests", "Admission and placement", "Fleet", "Engine", "Prefill/decode split")
    places = [
        place for section in sections for row in table_rows(text, section) for place in _CODE.findall(row[2])
    ]
    assert len(places) > 50
    assert [place for place in places if "/" in place and not (ROOT / place).exists()] == []
    assert [place for place in places if "/" not in place and not set(place.split(".")) <= names] == []


def test_the_files_that_a_change_touches_exist() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    places = {place for place in _CODE.findall(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/[\w.-]*", place)}
    assert len(places) > 30
    assert {place for place in places if not (ROOT / place).exists()} == set()


def test_paths_of_the_source_in_documents_exist() -> None:
    missing = {
        str(file): absent
        for file in tracked("*.md")
        if file.parent.name != "changelog.d"
        and (absent := [place for place in paths_in((ROOT / file).read_text("utf-8")) if not found(place)])
    }
    assert missing == {}


def paths_in(text: str) -> list[str]:
    """Return what stands between backticks and begins with a folder of the source; `{a,b}` is one path."""
    tops = "|".join((*GROUPS, "services", "protos", "tests", "deploy", "docs", "benchmarks", "examples"))
    return [code for code in _CODE.findall(text) if re.fullmatch(rf"(?:{tops})/[\w./*-]*[\w/*]", code)]


def found(place: str) -> bool:
    return any(ROOT.glob(place.rstrip("/")))
