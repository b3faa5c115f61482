"""The operator's side: which regions are there, who holds them, what may go, what would fit.

The questions are :mod:`.regions` and :mod:`.fit`, as functions that give data; :mod:`.commands` are the
subcommands over them, :mod:`.report` is what those print.
"""
