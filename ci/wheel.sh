#!/usr/bin/env bash
# Builds a manylinux_2_17 wheel for this machine's processor into dist/, and inspects it.
# The linker is zig's: it links against the symbol versions of an old glibc, whatever glibc this machine has.
source "$(dirname -- "$0")/lib.sh"
need_cargo
ci/env.sh build wheel
lock_checkout

arch=$(uname -m)
start=$SECONDS
say "wheel: building manylinux2014 for $arch with maturin and zig"
rm -f dist/ec_shared_region-*_"$arch".whl
# maturin looks for zig with the `python3` on PATH.
PATH=$VENV/bin:$PATH "$VENV_PYTHON" -m maturin build --release --zig --compatibility manylinux2014 \
    --target "$arch-unknown-linux-gnu" --target-dir "$TARGET/manylinux" "${CARGO_FLAGS[@]}" --out dist >&2
wheels=(dist/ec_shared_region-*_"$arch".whl)
say "wheel: built in $(duration $((SECONDS - start))), inspecting it"
"$VENV_PYTHON" ci/check_wheel.py --load --arch "$arch" "${wheels[@]}"
say "wheel: \`${wheels[0]}\`"
