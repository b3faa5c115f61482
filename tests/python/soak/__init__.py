"""The soak: many processes live and die over few regions, and a referee proves from outside that nobody was harmed.

| file | what it does |
|---|---|
| `__main__.py` | options, a /dev/shm of its own, the end |
| `plan.py` | what is at stake: ids, shapes, and the words that actors write into the bytes; pure |
| `actors.py` | one process: constructs, writes, reads, pins, leaves, dies; reports all of it |
| `offspring.py` | what an actor starts: forked children and programs |
| `deaths.py` | timers by which the kernel kills an actor in the middle of a step |
| `mutants.py` | actors that do wrong on purpose, which show that the referee sees it |
| `referee.py` | starts, kills, stops and reaps processes, and looks at /dev/shm and /proc by itself |
| `procfs.py` | what /proc says of mappings, locks and descendants |
| `record.py` | a round as it was reported: who was where, surely and perhaps; pure |
| `judge.py` | from that to findings; pure |
| `waits.py` | how long constructors waited after a death; pure |
| `report.py` | counts, progress, the summary |

`python -m soak --help`, with `tests/python` on `PYTHONPATH`; `make soak` does that.
"""
