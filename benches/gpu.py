"""Registration and copies on a real GPU: prints a table, and writes it as Markdown and JSON where asked.

Run by ``make bench-gpu``. Figures are medians of interleaved rounds, against memory of ``cudaHostAlloc`` (torch's
``pin_memory=True``) and against the region before it is pinned, in the same run.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROUNDS = 7
BLOCK_SIZE_BYTES = 7168


def _seconds(torch: Any, work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _copy_both_ways(torch: Any, speeds: dict[str, list[float]], name: str, host: Any, device: Any) -> None:
    gib = host.numel() / 2**30
    speeds.setdefault(f"{name}, host to device", []).append(
        gib / _seconds(torch, lambda: device.copy_(host, non_blocking=True))
    )
    speeds.setdefault(f"{name}, device to host", []).append(
        gib / _seconds(torch, lambda: host.copy_(device, non_blocking=True))
    )


def collapse(address: int, size_bytes: int) -> bool:
    """Puts the whole 2 MiB extents of a mapping into huge pages (``MADV_COLLAPSE``, Linux 6.1); False where refused.

    The kernel also refuses where address and file offset are not congruent modulo 2 MiB.
    """
    huge = 2 << 20
    start = -(-address // huge) * huge
    length = (address + size_bytes - start) // huge * huge
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return length > 0 and madvise(start, length, 25) == 0


def measure(torch: Any, gib: float, huge_pages: bool) -> dict[str, Any] | None:
    """One region of ``gib`` GiB: seconds per GiB to register, and GiB/s to and from the device.

    None where huge pages are asked for and the kernel gives none.
    """
    from ec_shared_region import ECSharedRegion

    register: list[float] = []
    speeds: dict[str, list[float]] = {}
    engine_id = f"bench-gpu-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with ECSharedRegion(engine_id, int(gib * 2**30) // BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES) as region:
        if huge_pages and not collapse(region._blocks_ptr, region.nbytes):
            return None
        device = torch.empty(region.blocks.shape, dtype=torch.int8, device="cuda")
        allocated = torch.empty(region.blocks.shape, dtype=torch.int8, pin_memory=True)
        for _ in range(ROUNDS):
            _copy_both_ways(torch, speeds, "region, not pinned", region.blocks, device)
            _copy_both_ways(torch, speeds, "cudaHostAlloc", allocated, device)
            result = region.pin_memory()
            if not result:
                raise click.ClickException(f"the region could not be pinned: {result.reason}")
            register.append(result.seconds / (region.nbytes / 2**30))
            _copy_both_ways(torch, speeds, "region, pinned", region.blocks, device)
            region.unpin_memory()
        return {
            "region_bytes": region.nbytes,
            "page_size_bytes": 2 << 20 if huge_pages else os.sysconf("SC_PAGESIZE"),
            "register_seconds_per_gib": statistics.median(register),
            "pieces": result.pieces,
            "library_path": result.library_path,
            "gib_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        }


def as_table(title: str, regions: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table, a column for each region."""
    names = list(regions[0]["gib_per_second"])
    lines = [f"{title}", "", "| | " + " | ".join(f"{row['region_bytes'] / 2**30:.2f} GiB" for row in regions) + " |"]
    lines.append("|---|" + "--:|" * len(regions))
    lines.append("| page size | " + " | ".join(f"{row['page_size_bytes'] // 1024} KiB" for row in regions) + " |")
    lines.append("| pieces | " + " | ".join(str(row["pieces"]) for row in regions) + " |")
    register = (f"{row['register_seconds_per_gib']:.3f} s" for row in regions)
    lines.append("| registration per GiB | " + " | ".join(register) + " |")
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{row['gib_per_second'][name]:.1f} GiB/s" for row in regions) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--gib", type=float, multiple=True, default=(1.0, 4.0), show_default=True, help="Sizes of the region.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here too.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too."
)
def main(gib: tuple[float, ...], table: Path | None, json_path: Path | None) -> None:
    """Measures registration and copies of a region on the current GPU, in base pages and in huge pages."""
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine", file=sys.stderr)
        return
    card = torch.cuda.get_device_name()
    measured = [measure(torch, size, huge) for size in gib for huge in (False, True)]
    regions = [row for row in measured if row is not None]
    if len(regions) < len(measured):
        print("no huge pages to be had: those columns are left out", file=sys.stderr)
    text = as_table(f"{card}, CUDA {torch.version.cuda}, Linux {platform.release()}", regions)
    print(text)
    if table is not None:
        table.write_text(text)
    if json_path is not None:
        figures = {"gpu": card, "cuda": torch.version.cuda, "kernel": platform.release(), "regions": regions}
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
