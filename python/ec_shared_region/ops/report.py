"""What the operator's commands print: tables or JSON on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .regions import ReapResult, RegionInfo

__all__ = [
    "list_as_json",
    "print_list",
    "print_reap",
    "print_region",
    "printable",
    "reap_as_json",
    "region_as_json",
]

# A table in a file or a pipe is not squeezed into the 80 columns that rich would assume.
_PIPE_COLUMNS = 160
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_STYLES = {"live": "green", "orphan": "yellow", "damaged": "bold red", "foreign": "dim", "unclear": "dim"}


def printable(text: str) -> str:
    """Names are chosen by anybody who may write to /dev/shm: nothing in them may steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def size(number: int) -> str:
    """Bytes for people."""
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number} B"


def age(seconds: float) -> str:
    """A time span for people: its largest unit, and the next."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{whole} s"


def list_as_json(regions: list[RegionInfo]) -> str:
    """One object: every region, and the sums. Sizes in bytes, times in seconds."""
    return json.dumps(
        {
            "regions": [_region(region) for region in regions],
            "size_bytes": sum(region.size_bytes for region in regions),
            "allocated_bytes": sum(region.allocated_bytes for region in regions),
        },
        indent=2,
    )


def region_as_json(region: RegionInfo) -> str:
    """One object, as in the list."""
    return json.dumps(_region(region), indent=2)


def _region(region: RegionInfo) -> dict[str, Any]:
    data = asdict(region)
    data["identity"] = None if region.identity is None else region.identity._asdict()
    return data


def reap_as_json(result: ReapResult) -> str:
    """One object: every decision, and the bytes that came back (in a dry run: would)."""
    return json.dumps({**asdict(result), "freed_bytes": result.freed_bytes}, indent=2)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False, emoji=False)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


def _geometry(region: RegionInfo) -> str:
    if region.num_blocks is None:
        return "-"
    return f"{region.num_blocks:,} x {region.block_size_bytes:,}"


def _owner(uid: int, name: str | None) -> str:
    return str(uid) if name is None else printable(name)


def _holders(region: RegionInfo) -> str:
    texts = [str(holder.pid) for holder in region.holders]
    if region.unseen_holders:
        texts.append(f"{region.unseen_holders} elsewhere")
    return ", ".join(texts) or "-"


def print_list(regions: list[RegionInfo]) -> None:
    """One line for each region, and one for all."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _console()
    if not regions:
        _say(console, "no regions in /dev/shm")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("blocks x bytes", "size", "resident", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("owner", no_wrap=True)
    table.add_column("held by", overflow="fold")
    for region in regions:
        name = region.path.rsplit("/", 1)[1] if region.id is None else region.id
        table.add_row(
            Text(printable(name)),
            Text(region.state, style=_STYLES.get(region.state, "")),
            _geometry(region),
            size(region.size_bytes),
            size(region.allocated_bytes),
            age(region.age_seconds),
            Text(_owner(region.uid, region.owner)),
            _holders(region),
        )
    console.print(table)
    resident = size(sum(region.allocated_bytes for region in regions))
    count = "1 region" if len(regions) == 1 else f"{len(regions):,} regions"
    _say(console, f"{count}, {resident} resident")
    orphans = [region for region in regions if region.state == "orphan"]
    if orphans:
        resident = size(sum(region.allocated_bytes for region in orphans))
        _say(console, f"orphans: {len(orphans)}, {resident}; `ec-shared-region reap --all` removes them")


def print_region(region: RegionInfo) -> None:
    """All that is known of one region, a fact a line, then a table of its holders."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _console()
    _say(console, printable(region.path))
    facts = {
        "state": f"{region.state}: {region.reason}",
        "geometry": "not announced"
        if region.num_blocks is None
        else f"{region.num_blocks:,} blocks x {region.block_size_bytes:,} bytes",
        "size": f"{size(region.size_bytes)} ({region.size_bytes:,} bytes)",
        "resident": f"{size(region.allocated_bytes)} ({region.allocated_bytes:,} bytes)",
        "age": age(region.age_seconds),
        "owner": f"{_owner(region.uid, region.owner)} (uid {region.uid}), mode {region.mode:04o}",
        "identity": "not announced"
        if region.identity is None
        else f"device {region.identity.device}, inode {region.identity.inode}, nonce {region.identity.nonce}",
    }
    for name, text in facts.items():
        _say(console, f"  {name:<9} {printable(text)}")
    if region.holders:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("pid", justify="right")
        table.add_column("user")
        table.add_column("mapped", justify="right", no_wrap=True)
        table.add_column("open")
        table.add_column("command", overflow="fold")
        for holder in region.holders:
            table.add_row(
                str(holder.pid),
                Text(_owner(holder.uid, holder.user)),
                size(holder.mapped_bytes) if holder.mapped_bytes else "-",
                "yes" if holder.is_open else "no",
                Text(printable(holder.command) + (" (dying)" if holder.is_dying else "")),
            )
        console.print(table)
    if region.unseen_holders:
        _say(
            console,
            f"held by {region.unseen_holders} or more processes elsewhere: in another container, or hidden by rights",
        )
    elif not region.holders:
        _say(console, "held by nobody")


def print_reap(result: ReapResult) -> None:
    """One line for each decision, and one for all."""
    console = _console()
    verb = "would remove" if result.dry_run else "removed"
    for decision in result.decisions:
        if decision.is_removed:
            text = f"{verb} {decision.path}: {decision.reason}, {size(decision.freed_bytes)}"
        elif decision.state is None:
            text = f"nothing at {decision.path}: {decision.reason}"
        else:
            text = f"kept {decision.path}: {decision.state}: {decision.reason}"
        _say(console, printable(text))
    count = len(result.removed)
    came = "would come" if result.dry_run else "came"
    _say(console, f"{verb} {count} of {len(result.decisions)}; {size(result.freed_bytes)} {came} back")
