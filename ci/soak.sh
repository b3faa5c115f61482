#!/usr/bin/env bash
# Installs the wheel in .venv and soaks it: many processes live and die over few regions, a referee looks on.
# usage: ci/soak.sh [OPTION...]   (see `--help`; without a length it goes on until 10,000 deaths by SIGKILL)
source "$(dirname -- "$0")/lib.sh"
ci/install.sh dev

options=("$@")
[[ " $* " =~ " "(--kills|--seconds|-h|--help)[=\ ] ]] || options=(--kills 10000 "$@")
say "soak: ${options[*]}"
# -P: the installed package is what is soaked. Threads of numpy's would not survive the referee's forks.
PYTHONPATH=tests/python OPENBLAS_NUM_THREADS=1 exec "$VENV_PYTHON" -P -m soak "${options[@]}"
