# shellcheck shell=bash
# Sourced by the scripts beside it: where things are, how to speak, which tools to use.
# Talk goes to stderr, so that stdout holds only what a program answers (`make demo ARGS=--json | jq .`).
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
TARGET=$ROOT/target
cd -- "$ROOT"

# A caller's environment decides where packages come from, never where they go or which code runs.
unset PYTHONHOME PYTHONPATH MYPYPATH CARGO_BUILD_TARGET
export CARGO_TARGET_DIR=$TARGET
export PYTHONUNBUFFERED=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_USER=0 PIP_QUIET=0 PIP_NO_DEPS=0 PIP_DRY_RUN=0
# rustup puts cargo here and leaves PATH to the login shell, which may not have been started again since.
command -v cargo >/dev/null || PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin

CARGO_FLAGS=()
if [[ ${CI:-} == true ]]; then
    # A lock file that no longer fits is an error there; a build from nothing has no use for increments.
    CARGO_FLAGS+=(--locked)
    export CARGO_INCREMENTAL=0
fi

say() { printf '==> %s\n' "$*" >&2; }

# fail MESSAGE HINT
fail() {
    printf 'error: %s\n' "$1" >&2
    [[ -z ${2:-} ]] || printf 'hint: %s\n' "$2" >&2
    exit 1
}

# 75 -> 1 min 15 s
duration() {
    if (($1 < 60)); then printf '%d s' "$1"; else printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); fi
}

# still_here LABEL FOLDER COMMAND...: on a terminal the command shows its own progress; elsewhere a line every
# 15 s says that it lives and how large the folder has become.
still_here() {
    local label=$1 folder=$2 start=$SECONDS last=$SECONDS child status=0
    shift 2
    if [[ -t 2 ]]; then
        "$@" >&2
        return
    fi
    "$@" >&2 &
    child=$!
    # A background command of a script ignores Ctrl-C, so it has to be told.
    trap 'kill "$child" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        if ((SECONDS - last >= 15)); then
            last=$SECONDS
            say "$label: still at it after $(duration $((SECONDS - start))), $(du -sh "$folder" 2>/dev/null | cut -f1) in \`${folder#"$ROOT"/}\`"
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM
    return "$status"
}

# The environment and the build folder have one writer at a time; the lock ends with the script that took it.
lock_checkout() {
    command -v flock >/dev/null || return 0
    mkdir -p "$TARGET"
    exec 9>"$TARGET/.checkout.lock"
    if ! flock --nonblock 9; then
        say "another build is at work in this checkout: waiting for it"
        flock 9
    fi
}

need_cargo() {
    local wanted
    wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)
    cargo --version >/dev/null 2>&1 ||
        fail "no Rust toolchain: \`cargo --version\` does not run" "install Rust $wanted or newer, for example from https://rustup.rs"
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
        fail "no C compiler: Rust links through \`cc\`" "install one, for example \`apt-get install gcc libc6-dev\`"
}

# need_cargo_tool SUBCOMMAND COMPONENT: the toolchain is its owner's, so this asks and does not install.
need_cargo_tool() {
    cargo "$1" --version >/dev/null 2>&1 ||
        fail "\`cargo $1\` is missing" "add it to the toolchain: \`rustup component add $2\`, or the system's package of that name"
}
