"""Registration and copies on a real GPU: prints a table, and writes the figures as JSON where asked.

Run by ``make bench-gpu``. Figures are medians of interleaved rounds, against memory of ``cudaHostAlloc`` (torch's
``pin_memory=True``) and against the region before it is pinned, in the same run.
"""

from __future__ import annotations

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


def measure(torch: Any, gib: float) -> dict[str, Any]:
    """One region of ``gib`` GiB: seconds per GiB to register, and GiB/s to and from the device."""
    from ec_shared_region import ECSharedRegion

    register: list[float] = []
    speeds: dict[str, list[float]] = {}
    engine_id = f"bench-gpu-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with ECSharedRegion(engine_id, int(gib * 2**30) // BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES) as region:
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
            "page_size_bytes": os.sysconf("SC_PAGESIZE"),
            "register_seconds_per_gib": statistics.median(register),
            "pieces": result.pieces,
            "library_path": result.library_path,
            "gib_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        }


@click.command()
@click.option("--gib", type=float, multiple=True, default=(1.0, 4.0), show_default=True, help="Sizes of the region.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too."
)
def main(gib: tuple[float, ...], json_path: Path | None) -> None:
    """Measures registration and copies of a region on the current GPU."""
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine", file=sys.stderr)
        return
    card = torch.cuda.get_device_name()
    regions = [measure(torch, size) for size in gib]
    print(f"{card}, CUDA {torch.version.cuda}, Linux {platform.release()}")
    for row in regions:
        print(
            f"\n{row['region_bytes'] / 2**30:.2f} GiB region: "
            f"registered in {row['register_seconds_per_gib']:.3f} s per GiB, {row['pieces']} pieces"
        )
        for name, speed in row["gib_per_second"].items():
            print(f"  {name:36} {speed:8.1f} GiB/s")
    if json_path is not None:
        figures = {"gpu": card, "cuda": torch.version.cuda, "kernel": platform.release(), "regions": regions}
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
