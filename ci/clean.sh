#!/usr/bin/env bash
# Removes what the other scripts made; with --venv the environment too.
source "$(dirname -- "$0")/lib.sh"
doomed=(target dist .hypothesis .mypy_cache .pytest_cache .ruff_cache)
[[ ${1:-} != --venv ]] || doomed+=(.venv)
for name in "${doomed[@]}"; do
    if [[ -e $name || -L $name ]]; then
        say "removing \`$name\`"
        rm -rf "$name"
    fi
done
