#!/usr/bin/env bash
# Installs the wheel in .venv, measures registration and copies on this machine's GPU, and writes docs/gpu.md.
source "$(dirname -- "$0")/lib.sh"
ci/install.sh
say "bench: benches/gpu.py${*:+ $*}"
exec "$VENV_PYTHON" -P benches/gpu.py --table docs/gpu.md "$@"
