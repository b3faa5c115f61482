#!/usr/bin/env bash
# Installs the wheel in .venv and measures registration and copies on this machine's GPU.
source "$(dirname -- "$0")/lib.sh"
ci/install.sh
say "bench: benches/gpu.py${*:+ $*}"
exec "$VENV_PYTHON" -P benches/gpu.py "$@"
