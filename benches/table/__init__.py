"""The table of `make bench`: what each step costs, beside the stock way, its peers and the machine's own limit.

The path of the data, from top to bottom:

| file | what it does |
|---|---|
| `rows.py` | the rows P1 to P12: what is measured, floor, expectation |
| `growth.py` | larger regions, more joiners, more regions |
| `peers.py` | the same work by other packages |
| `jobs.py` | the work itself, in a process that was forked for it |
| `family.py` | forks processes, lets them meet, collects what they saw |
| `limits.py` | what the machine can do at best: zeroing and contiguous copies, in a process of their own |
| `measure.py` | interleaved rounds, warm memory, a busy neighbour noticed |
| `stage.py` | the process that measures, with a /dev/shm of its own |
| `figures.py` | what was measured, and the arithmetic on it; to JSON and back; pure |
| `text.py` | the table as text; pure |
| `draw.py` | the table as a picture |
| `__main__.py` | options, progress, the verdict |

`python -m table --help`, with `benches` and `tests/python` on `PYTHONPATH`; `make bench` does that. The stock way is
`tests/python/oracle.py`.
"""
