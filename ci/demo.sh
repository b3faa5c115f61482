#!/usr/bin/env bash
# Installs the wheel in .venv and runs the demo; arguments go on to it, stdout is the demo's alone.
source "$(dirname -- "$0")/lib.sh"
ci/install.sh
say "demo: ec-shared-region demo${*:+ $*}"
exec "$VENV/bin/ec-shared-region" demo "$@"
