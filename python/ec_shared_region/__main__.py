"""``python -m ec_shared_region``: the command ``ec-shared-region``."""

from __future__ import annotations

from .cli import main

# A process that multiprocessing spawns imports this module again, under another name.
if __name__ == "__main__":
    main()
