#!/usr/bin/env bash
# Makes .venv if it is not there, and installs what pyproject.toml asks for and the environment lacks.
# usage: ci/env.sh SECTION...   (sections as in ci/requirements.py)
source "$(dirname -- "$0")/lib.sh"
lock_checkout

is_suitable() {
    # abi3 is an ABI of CPython with the interpreter lock, and not of its free-threaded build.
    "$1" -c '
import sys, sysconfig
good = sys.version_info >= (3, 11) and sys.implementation.name == "cpython"
sys.exit(not good or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1
}

find_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        is_suitable "$PYTHON" || fail "\`PYTHON=$PYTHON\` is not a CPython 3.11 or newer that runs" "name another one, or leave PYTHON unset"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if is_suitable "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "no CPython 3.11 or newer is on PATH (\`python3\`: $(python3 --version 2>&1 || true))" \
        "install one, for example \`apt-get install python3 python3-pip\`, or name it: \`make demo PYTHON=/path/to/python3.12\`"
}

make_venv() {
    local python=$1
    # An error below would leave half an environment, which the next run throws away: it has no mark.
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$VENV" >&2
    elif "$python" -c 'import venv' 2>/dev/null && "$python" -m pip --version >/dev/null 2>&1; then
        # Debian keeps ensurepip in python3-venv; the system's pip can fill an environment from outside too.
        say "this Python has no ensurepip: pip comes from the package index instead"
        "$python" -m venv --clear --without-pip "$VENV" >&2
        "$python" -m pip --python "$VENV_PYTHON" install --progress-bar off pip >&2
    else
        fail "\`$python\` can make no virtual environment: it has neither \`ensurepip\` nor \`pip\`" \
            "install them, for example \`apt-get install python3-venv\` (Debian, Ubuntu)"
    fi
}

if is_suitable "$VENV_PYTHON" && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    say "environment: \`.venv\` is here ($("$VENV_PYTHON" --version))"
else
    python=$(find_python)
    if [[ -e $VENV ]]; then
        say "environment: \`.venv\` does not run or is older than Python 3.11: making it anew"
    fi
    say "environment: making \`.venv\` with $("$python" --version) (\`$python\`)"
    make_venv "$python"
fi

# list_missing SECTION...: leaves in `missing` what the environment lacks.
list_missing() {
    local lines
    lines=$("$VENV_PYTHON" ci/requirements.py --missing "$@")
    missing=()
    [[ -z $lines ]] || mapfile -t missing <<<"$lines"
}

list_missing "$@"
if ((${#missing[@]} == 0)); then
    say "environment: has all of: $*"
    exit
fi

say "environment: to be installed: ${missing[*]}"
if [[ " ${missing[*]}" == *" torch"* ]]; then
    say "environment: torch is large (a CUDA build takes 3 GB of downloads and 5.4 GB of disk); it comes once and stays in \`.venv\`"
    free_kib=$(df -Pk "$VENV" | awk 'NR == 2 { print $4 }')
    ((free_kib > 12 << 20)) ||
        say "warning: $((free_kib >> 20)) GiB are free here; downloads, pip's cache and the installed files may need 12 GiB"
fi
# /tmp is often a small tmpfs, and the downloads wait there until all of them are complete.
export TMPDIR=$VENV/tmp
mkdir -p "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
start=$SECONDS
if ! still_here "environment" "$VENV" "$VENV_PYTHON" -m pip install "${missing[@]}"; then
    hint="pip's own message is above"
    [[ " ${missing[*]}" != *" torch"* ]] ||
        hint+="; where it found no torch for this Python, take an older one: \`make distclean\`, then \`make demo PYTHON=python3.12\`"
    fail "pip could not install: ${missing[*]}" "$hint"
fi
list_missing "$@"
((${#missing[@]} == 0)) ||
    fail "pip installed them elsewhere than in \`.venv\`: ${missing[*]}" \
        "a setting does that, such as \`target\`, \`prefix\` or \`root\`: \`$VENV_PYTHON -m pip config list\`"
say "environment: installed in $(duration $((SECONDS - start)))"
