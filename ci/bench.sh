#!/usr/bin/env bash
# Runs the criterion benches (their report lies in target/criterion), then the table of benches/table; arguments go to
# the table (see `--help`), and with any that ask for less than all of it the criterion benches are left out.
source "$(dirname -- "$0")/lib.sh"

is_whole=1
for argument in "$@"; do
    case $argument in
    --quick | --rows* | --from* | -h | --help) is_whole= ;;
    esac
done
if [[ -n $is_whole ]]; then
    need_cargo
    say "bench: building and running the criterion benches (\`cargo bench\`)"
    # Without a name cargo would also start the library's own, empty harness, which knows none of criterion's options.
    cargo bench "${CARGO_FLAGS[@]}" --bench '*' >&2
    say "bench: the report is \`target/criterion/report/index.html\`"
fi
ci/install.sh bench
# A peer whose dependencies are many: only what is measured of it. Without it its column says so.
mapfile -t alone < <("$VENV_PYTHON" ci/requirements.py --missing bench-alone)
if ((${#alone[@]})); then
    say "environment: to be installed without dependencies: ${alone[*]}"
    "$VENV_PYTHON" -m pip install --no-deps "${alone[@]}" >&2 ||
        say "warning: pip could not install ${alone[*]}: the table goes without"
fi
say "bench: the table${*:+, $*}"
# -P: the installed package is what is measured.
PYTHONPATH=benches:tests/python exec "$VENV_PYTHON" -P -m table "$@"
