"""``ec-shared-region demo``: an engine in miniature, on photographs, over one region.

A supervisor (the command itself, ``supervisor`` and ``engine``) starts one scheduler (``scheduler``) and N
workers (``worker``) as processes of their own. Photographs (``photos``) become encoder outputs by a patch
embedding (``encoder``); the scheduler says which block holds which row, worker 0 saves, the others load
and compare. ``messages`` is what the processes say to each other, ``report`` what the command prints.
"""
