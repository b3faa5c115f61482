#!/usr/bin/env bash
# Builds the wheel and installs it in .venv, each only where something changed since. It prints nothing on stdout.
# usage: ci/install.sh [SECTION...]   (further sections of ci/requirements.py that the environment shall have)
source "$(dirname -- "$0")/lib.sh"
need_cargo
ci/env.sh build project demo "$@"
lock_checkout

# The name is the wheel's content: sources, build configuration, compilers.
sources=()
for path in Cargo.toml Cargo.lock build.rs .cargo pyproject.toml README.md LICENSE src python; do
    [[ ! -e $path ]] || sources+=("$path")
done
digest=$({
    find "${sources[@]}" -name __pycache__ -prune -o -name '*.so' -prune -o -type f -print0 | sort -z | xargs -0 sha256sum
    rustc -Vv
    "$VENV_PYTHON" -m maturin --version
    env | grep -E '^(RUSTFLAGS|CARGO_PROFILE_|CARGO_ENCODED_RUSTFLAGS|MATURIN_)' || true
} | sha256sum | cut -c1-16)
wheels=$TARGET/wheel-$digest

shopt -s nullglob
built=("$wheels"/*.whl)
if ((${#built[@]} == 1)); then
    say "wheel: no source changed since \`${built[0]##*/}\` was built"
else
    say "wheel: building it with maturin (release profile)"
    start=$SECONDS
    rm -rf "$TARGET"/wheel-*
    "$VENV_PYTHON" -m maturin build --release "${CARGO_FLAGS[@]}" --interpreter "$VENV_PYTHON" --out "$wheels.part" >&2 ||
        fail "maturin could not build the wheel" "the compiler's message is above"
    mv "$wheels.part" "$wheels"
    built=("$wheels"/*.whl)
    say "wheel: built \`${built[0]##*/}\` in $(duration $((SECONDS - start)))"
fi
wheel=${built[0]}

# RECORD holds the hash of every installed file: it tells whether what is there is what this script put there.
installed_record() {
    local records=("$VENV"/lib/python3.*/site-packages/ec_shared_region-*.dist-info/RECORD)
    ((${#records[@]} == 1)) && sha256sum <"${records[0]}" | cut -d' ' -f1
}
stamp=$VENV/.installed-wheel
if [[ -f $stamp && $(<"$stamp") == "$digest $(installed_record)" ]]; then
    say "wheel: already installed in \`.venv\`"
    exit
fi
say "wheel: installing \`${wheel##*/}\` in \`.venv\`"
# Its dependencies are there already; without --no-deps pip would fetch torch once more to reinstall it.
"$VENV_PYTHON" -m pip install --no-deps --no-index --force-reinstall "$wheel" >&2
# -P: the current directory must not stand in for the installed package.
"$VENV_PYTHON" -P - "$VENV" >&2 <<'PYTHON'
import sys
from pathlib import Path

import ec_shared_region

place = Path(ec_shared_region.__file__).parent
if not place.is_relative_to(sys.argv[1]):
    sys.exit(f"error: `import ec_shared_region` finds `{place}`, outside `.venv`")
heavy = sorted({"torch", "cuda"} & sys.modules.keys())
if heavy:
    sys.exit(f"error: `import ec_shared_region` also imports: {', '.join(heavy)}")
PYTHON
printf '%s %s\n' "$digest" "$(installed_record)" >"$stamp"
