"""docs/field-cases.md is held to the tests and to its own links: nothing in it is only said."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "field-cases.md"
PYTHON_TESTS = Path(__file__).parent
OTHER_DOCUMENTS = [
    "docs/operations.md",
    "docs/performance.md",
    "docs/protocol.md",
    "docs/pinning.md",
    "SECURITY.md",
    "README.md",
]

ID = re.compile(r"\b(?:CR|ST|CA|PO|AT|LI|FO|PI|PE|NU|OB|PK|MN|FR)-\d{2}\b")
TEST = re.compile(r"`([\w./]+\.(?:py|rs)::\w+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


class Row(NamedTuple):
    id: str
    report: str
    answer: str
    shown_by: str


@cache
def rows() -> list[Row]:
    found = []
    for line in DOCUMENT.read_text().splitlines():
        if ID.match(line.removeprefix("| ")):
            # A cell may hold an escaped bar.
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            assert len(cells) == 4, line
            found.append(Row(*(cell.strip() for cell in cells)))
    return found


def anchors(path: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    found: set[str] = set()
    is_code = False
    for line in path.read_text().splitlines():
        is_code ^= line.startswith("```")
        if not is_code and (heading := re.match(r"#+ +(.*)", line)):
            text = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            number = sum(known == text or re.fullmatch(rf"{re.escape(text)}-\d+", known) is not None for known in found)
            found.add(text if number == 0 else f"{text}-{number}")
    return found


def marked() -> dict[str, set[str]]:
    """Ids in `pytest.mark.case(...)`, and in comments of Rust tests, with the files that have them."""
    found: dict[str, set[str]] = {}
    for path in sorted(PYTHON_TESTS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "case":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant) and ID.fullmatch(argument.value), (path.name, node.lineno)
                    found.setdefault(argument.value, set()).add(path.name)
    for path in sorted([*(ROOT / "src").rglob("*.rs"), *(ROOT / "tests").glob("*.rs")]):
        for comment in re.findall(r"//.*", path.read_text()):
            for case in ID.findall(comment):
                found.setdefault(case, set()).add(path.name)
    return found


@cache
def names_of_tests(path: Path) -> set[str]:
    if path.suffix == ".rs":
        # The name, with an attribute above it that makes it a test, or within proptest's macro.
        text = path.read_text()
        return set(re.findall(r"#\[test\](?:\s*#\[[^\]]*\])*\s*(?:async )?fn (\w+)", text))
    tree = ast.parse(path.read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}
    # hypothesis makes the class of a state machine: `TestLife = ...(Life.TestCase)`.
    for node in tree.body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        found |= {name for name in names if name.startswith("Test")}
    return found | {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")}


def test_there_are_as_many_rows_as_the_page_says_and_none_twice() -> None:
    ids = [row.id for row in rows()]
    further = [id for id in ids if id.startswith("FR-")]
    stated = re.search(r"in (\d+) public reports", DOCUMENT.read_text())
    assert stated and int(stated[1]) == len(ids) - len(further) == 145
    stated = re.search(r"^(\d+) more, found later", DOCUMENT.read_text(), flags=re.M)
    assert stated and int(stated[1]) == len(further)
    assert len(set(ids)) == len(ids), sorted(id for id in set(ids) if ids.count(id) > 1)


def test_no_report_is_answered_twice_and_each_further_one_has_a_test() -> None:
    addresses = [link[1] for row in rows() if (link := LINK.fullmatch(row.report))]
    further = [row for row in rows() if row.id.startswith("FR-")]
    new = {link[1] for row in further if (link := LINK.fullmatch(row.report))}
    assert len(new) == len(further)
    assert all(addresses.count(address) == 1 for address in new)
    assert [row.id for row in further if not TEST.search(row.shown_by)] == []


def test_no_row_was_lost_in_the_making_of_the_table() -> None:
    """Every id at the start of a line is a row, and every row stands under a heading of the table."""
    lines = DOCUMENT.read_text().splitlines()
    assert sum(bool(re.match(rf"\W*{ID.pattern}", line)) for line in lines) == len(rows())
    groups: dict[str, set[str]] = {}
    heading = ""
    for line in lines:
        if line.startswith("## "):
            heading = line
        elif match := ID.match(line.removeprefix("| ")):
            groups.setdefault(heading, set()).add(match[0][:2])
    assert len(groups) == 13 + 8  # and those of the further reports
    assert all(len(prefixes) == 1 for prefixes in groups.values()), groups


def faults_of(row: Row) -> Iterator[str]:
    if len(row.answer) <= 20 or not row.answer.endswith(".") or re.match(r"As [A-Z]{2}-", row.answer):
        yield f"no answer: {row.answer!r}"
    report = LINK.fullmatch(row.report)
    if not (report[1].startswith("https://") if report else "without an address" in row.report):
        yield f"no report: {row.report!r}"
    tests, links = TEST.findall(row.shown_by), LINK.findall(row.shown_by)
    if not tests and not links:
        yield "neither a test nor a paragraph"
    if len(tests) + len(links) != len(row.shown_by.split(", ")):
        yield f"not all of it was understood: {row.shown_by!r}"
    for test in tests:
        file, name = test.split("::")
        path = (ROOT / file) if file.endswith(".rs") else PYTHON_TESTS / file
        if not path.is_file() or name not in names_of_tests(path):
            yield f"no such test: {test}"


def test_every_row_has_an_answer_and_what_it_names_exists() -> None:
    assert {row.id: faults for row in rows() if (faults := list(faults_of(row)))} == {}


def test_what_is_not_met_says_where_it_belongs() -> None:
    unmet = [row for row in rows() if "**Not yet" in row.answer]
    stated = re.search(r"; (\d+) rows have one", DOCUMENT.read_text())
    assert stated and int(stated[1]) == len(unmet)
    for row in unmet:
        assert re.search(r"operator's side|[Pp]erformance|an option that", row.answer), row


def test_every_id_that_a_test_is_marked_with_is_in_the_document() -> None:
    known = {row.id for row in rows()}
    strangers = {case: files for case, files in marked().items() if case not in known}
    assert not strangers


def test_every_row_with_a_test_has_one_that_is_marked_with_it() -> None:
    """Either a marker in one of the files that the row names, or a comment in one of its Rust files."""
    by_id = marked()
    unmarked = {
        row.id: sorted(files)
        for row in rows()
        if (files := {Path(test.split("::")[0]).name for test in TEST.findall(row.shown_by)})
        and not files & by_id.get(row.id, set())
    }
    assert unmarked == {}


@pytest.mark.parametrize("name", ["docs/field-cases.md", *OTHER_DOCUMENTS])
def test_every_link_within_the_project_leads_somewhere(name: str) -> None:
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for link in LINK.findall(text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_markers_of_the_tests_are_spelled_as_the_document_spells_them() -> None:
    """The parser is not blind: it finds markers, Rust tests and anchors where there are some for sure."""
    assert {"CR-01", "PI-52"} <= set(marked())
    assert "the_first_creates_the_second_joins_and_both_see_the_same_bytes" in names_of_tests(
        ROOT / "tests" / "region.rs"
    )
    assert "a_registration_covers_all_overlaps_nothing_and_splits_nothing" in names_of_tests(ROOT / "src" / "pin.rs")
    assert "removeipc" in anchors(ROOT / "docs" / "operations.md")
    assert len(TEST.findall("`a.py::test_b`, `src/c.rs::d`")) == 2
