"""Inspects a built wheel from outside: its tags, its metadata, its files and the symbols of its extension module.

A fault is printed with what was found, and makes the exit status 1. With `--load` the extension module is also loaded,
in a process of its own, which only the processor that it was built for can do.
"""

from __future__ import annotations

import argparse
import email
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

PACKAGE = "ec_shared_region"
EXTENSION = f"{PACKAGE}/_core.abi3.so"
# The oldest of both that the wheel promises to run on.
PYTHON = "cp311"
GLIBC = (2, 17)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# Every load segment must lie on a boundary of the largest page that such a machine can have.
LARGEST_PAGE_BYTES = {"x86_64": 4 << 10, "aarch64": 64 << 10}
# What every glibc machine has. libpython would tie the wheel to one Python; CUDA is looked for at run time.
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux-[\w-]+)\.so\.\d+")


def faults_of_tags(wheel: Path, arch: str, info: Message) -> Iterator[str]:
    platforms = {f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}", f"manylinux2014_{arch}"}
    python, abi, platform = wheel.stem.split("-")[-3:]
    if (python, abi, set(platform.split("."))) != (PYTHON, "abi3", platforms):
        yield f"the file name's tag should be `{PYTHON}-abi3-{'.'.join(sorted(platforms))}`: {python}-{abi}-{platform}"
    expected = {f"{PYTHON}-abi3-{platform}" for platform in platforms}
    if set(info.get_all("Tag", [])) != expected:
        yield f"the tags in WHEEL should be those of the file name: {info.get_all('Tag')}"


def faults_of_metadata(metadata: Message) -> Iterator[str]:
    if metadata["Requires-Python"] != ">=3.11":
        yield f"`Requires-Python` should be `>=3.11`: {metadata['Requires-Python']}"
    if metadata["License-Expression"] != "Apache-2.0":
        yield f"`License-Expression` should be `Apache-2.0`: {metadata['License-Expression']}"
    requirements = metadata.get_all("Requires-Dist", [])
    for name in ("torch", "numpy"):
        if not any(re.match(rf"{name}\b", requirement) for requirement in requirements):
            yield f"`{name}` should be a dependency: {requirements}"
    for requirement in requirements:
        if re.search(r"<|~=|==", requirement.partition(";")[0]):
            yield f"a dependency should have no upper bound: {requirement}"


def faults_of_files(wheel: zipfile.ZipFile, version: str) -> Iterator[str]:
    names = wheel.namelist()
    if broken := wheel.testzip():
        yield f"a file is damaged: {broken}"
    dist_info = f"{PACKAGE}-{version}.dist-info"
    needed = [
        EXTENSION,
        f"{PACKAGE}/__init__.py",
        f"{PACKAGE}/_core.pyi",
        f"{PACKAGE}/py.typed",
        f"{dist_info}/entry_points.txt",
        f"{dist_info}/licenses/LICENSE",
    ]
    for name in needed:
        if name not in names:
            yield f"a file is missing: {name}"
    for name in names:
        if name.split("/")[0] not in (PACKAGE, dist_info):
            yield f"a file lies outside the package: {name}"
        if ".so" in name and name != EXTENSION:
            yield f"there should be one shared object: {name}"
        if name.endswith((".pyc", ".rs", ".toml")):
            yield f"a file does not belong in a wheel: {name}"


def faults_of_extension(elf: ELFFile, arch: str) -> Iterator[str]:
    if (elf["e_machine"], elf["e_type"], elf.elfclass) != (MACHINES[arch], "ET_DYN", 64):
        yield f"should be a 64-bit shared object for {arch}: {elf['e_machine']}, {elf['e_type']}, {elf.elfclass} bits"

    symbols = elf.get_section_by_name(".dynsym")
    assert isinstance(symbols, SymbolTableSection)
    exported = {s.name for s in symbols.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name}
    if exported != {"PyInit__core"}:
        yield f"should export `PyInit__core` and nothing else: {', '.join(sorted(exported)) or 'nothing'}"

    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            tags = list(section.iter_tags())
            for needed in (tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"):
                if not SYSTEM_LIBRARIES.fullmatch(needed):
                    yield f"should need the system's libraries only: {needed}"
            for tag in tags:
                if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"):
                    yield f"should have no {tag.entry.d_tag}"
        elif isinstance(section, GNUVerNeedSection):
            for library, versions in section.iter_versions():
                for version in (auxiliary.name for auxiliary in versions):
                    glibc = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
                    if glibc and (int(glibc[1]), int(glibc[2])) > GLIBC:
                        yield f"needs a symbol newer than glibc {GLIBC[0]}.{GLIBC[1]}: {library.name} {version}"
        elif section.name in (".symtab", ".debug_info"):
            yield f"should be stripped: it has `{section.name}`"

    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_LOAD" and segment["p_align"] % LARGEST_PAGE_BYTES[arch]:
            yield f"cannot be loaded where a page has {LARGEST_PAGE_BYTES[arch]} bytes: aligned to {segment['p_align']}"
        if segment["p_type"] == "PT_GNU_STACK" and segment["p_flags"] & 1:
            yield "asks for an executable stack"


def faults_of_loading(extension: bytes) -> Iterator[str]:
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("{PACKAGE}._core", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(EXTENSION).name)
        path.write_bytes(extension)
        run = subprocess.run([sys.executable, "-I", "-c", program, path], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        yield f"does not load: {run.stderr.strip() or f'exit status {run.returncode}'}"


def faults(path: Path, arch: str, load: bool) -> Iterator[str]:
    version = path.name.split("-")[1]
    dist_info = f"{PACKAGE}-{version}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        info = email.message_from_bytes(wheel.read(f"{dist_info}/WHEEL"))
        metadata = email.message_from_bytes(wheel.read(f"{dist_info}/METADATA"))
        yield from faults_of_tags(path, arch, info)
        yield from faults_of_metadata(metadata)
        yield from faults_of_files(wheel, version)
        if EXTENSION not in wheel.namelist():
            return
        extension = wheel.read(EXTENSION)
    for fault in faults_of_extension(ELFFile(io.BytesIO(extension)), arch):
        yield f"`{EXTENSION}` {fault}"
    if load:
        for fault in faults_of_loading(extension):
            yield f"`{EXTENSION}` {fault}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=sorted(MACHINES), required=True)
    parser.add_argument("--load", action="store_true", help="load the extension module into this kind of Python too")
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    found = list(faults(arguments.wheel, arguments.arch, arguments.load))
    for fault in found:
        print(f"error: `{arguments.wheel.name}`: {fault}")
    if not found:
        kib = arguments.wheel.stat().st_size >> 10
        print(
            f"`{arguments.wheel.name}` ({kib} KiB): {PYTHON}-abi3, {arguments.arch}, glibc {GLIBC[0]}.{GLIBC[1]}, "
            f"exports PyInit__core only, needs neither libpython nor CUDA to load"
            + (", loads here" if arguments.load else "")
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
