"""Prints requirements of `pyproject.toml`, one a line, for pip.

Sections: `project` (the package's dependencies), `build` (its build back-end), an extra, or a dependency group.
With `--missing`, only those that this interpreter's environment does not meet.
"""

from __future__ import annotations

import argparse
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(pyproject: dict[str, Any], section: str) -> list[str]:
    if section == "project":
        found = pyproject["project"]["dependencies"]
    elif section == "build":
        found = pyproject["build-system"]["requires"]
    else:
        extras = pyproject["project"].get("optional-dependencies", {})
        groups = pyproject.get("dependency-groups", {})
        found = extras.get(section) or groups.get(section)
    if found is None:
        raise SystemExit(f"error: `{PYPROJECT.name}` has no extra and no dependency group: {section}")
    return [str(requirement) for requirement in found]


def is_missing(text: str) -> bool:
    # pip carries the one parser that is sure to be here before anything is installed.
    from pip._vendor.packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return False
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return True
    # What an interrupted install leaves may have a name and no version.
    return version is None or not requirement.specifier.contains(version, prereleases=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("sections", nargs="+")
    arguments = parser.parse_args()
    pyproject = tomllib.loads(PYPROJECT.read_text())
    for section in arguments.sections:
        for requirement in requirements(pyproject, section):
            if not arguments.missing or is_missing(requirement):
                print(requirement)


if __name__ == "__main__":
    main()
