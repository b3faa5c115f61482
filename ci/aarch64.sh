#!/usr/bin/env bash
# Cross-builds the manylinux_2_17 wheel for aarch64 into dist/, and inspects it. It is not run: that takes such a machine.
# The standard library for aarch64 is the Rust toolchain's own where it has one, else that of Debian's packages, which
# root gets installed. A toolchain of rustup is left as it is: adding a target to it is up to its owner.
source "$(dirname -- "$0")/lib.sh"

ARCH=aarch64
TRIPLE=$ARCH-unknown-linux-gnu
DEBIAN_PACKAGES=(rustc-web libstd-rust-web-dev:arm64)

if [[ $(uname -m) == "$ARCH" ]]; then
    say "aarch64: this machine is one, so this is \`make wheel\`"
    exec ci/wheel.sh
fi
need_cargo

# has_target RUSTC: whether that compiler has a standard library for aarch64.
has_target() {
    local folder
    folder=$("$1" --print target-libdir --target "$TRIPLE" 2>/dev/null) && compgen -G "$folder/libstd-*.rlib" >/dev/null
}

find_compiler() {
    local candidate
    for candidate in rustc /usr/bin/rustc; do
        if has_target "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if ! compiler=$(find_compiler); then
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        say "aarch64: installing Debian's ${DEBIAN_PACKAGES[*]} (this adds the architecture arm64 to dpkg)"
        dpkg --add-architecture arm64
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update && apt-get install --yes --no-install-recommends "${DEBIAN_PACKAGES[@]}"; } </dev/null >&2 ||
            say "aarch64: apt-get could not install them"
    fi
    compiler=$(find_compiler) ||
        fail "no Rust compiler here has a standard library for \`$TRIPLE\`" \
            "as root on Debian: \`dpkg --add-architecture arm64 && apt-get update && apt-get install ${DEBIAN_PACKAGES[*]}\`; with rustup: \`rustup target add $TRIPLE\`"
fi

ci/env.sh build wheel
lock_checkout

start=$SECONDS
say "aarch64: building manylinux2014 with $("$compiler" --version), maturin and zig"
rm -f dist/ec_shared_region-*_"$ARCH".whl
# A build folder of its own, since this may be another compiler than the one that builds everything else.
RUSTC=$compiler PATH=$VENV/bin:$PATH "$VENV_PYTHON" -m maturin build --release --zig --compatibility manylinux2014 \
    --target "$TRIPLE" --target-dir "$TARGET/aarch64" "${CARGO_FLAGS[@]}" --out dist >&2
wheels=(dist/ec_shared_region-*_"$ARCH".whl)
say "aarch64: built in $(duration $((SECONDS - start))), inspecting it"
"$VENV_PYTHON" ci/check_wheel.py --arch "$ARCH" "${wheels[@]}"
say "aarch64: \`${wheels[0]}\` was built and inspected; it was NOT run, since this machine is $(uname -m)"
