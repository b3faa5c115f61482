#!/usr/bin/env bash
# Runs the core's tests under tools that see what no test asserts: memory used wrongly, and leaks.
# usage: ci/sanitize.sh address|valgrind|all   (docs/testing.md says what each sees)
# Where a tool is not here a line says so; `address` and `valgrind` then end with 77, as a skipped step of ci/test.sh.
source "$(dirname -- "$0")/lib.sh"

part=${1:-all}
SKIPPED=77
# The one program that is wrong on purpose: a tool that does not see this sees nothing.
CANARY='
fn main() {
    let is_leak = std::env::args().len() == 1;
    // Several, since the last one'"'"'s address may be left in a register.
    for _ in 0..100 {
        let memory = Box::into_raw(Box::new([7u8; 64]));
        if !is_leak {
            drop(unsafe { Box::from_raw(memory) });
        }
        std::hint::black_box(unsafe { memory.cast::<u8>().add(1).read_volatile() });
    }
}'

# skip WHAT WHY
skip() {
    say "$1: skipped, since $2"
    return "$SKIPPED"
}

# canary FOLDER RUSTC...: builds it there.
canary() {
    local folder=$1
    shift
    mkdir -p "$folder"
    printf '%s\n' "$CANARY" >"$folder/canary.rs"
    "$@" --edition 2024 -g -o "$folder/canary" "$folder/canary.rs"
}

address() {
    local folder=$TARGET/asan host reports options report found=0 status=0
    # Asked for and not just tried: `cargo +nightly` may fetch a toolchain that is not there.
    if ! command -v rustup >/dev/null || ! rustup toolchain list | grep -q '^nightly'; then
        skip "address sanitizer" "it needs a nightly toolchain and \`rustup toolchain list\` has none" || return
    fi
    host=$(rustc +nightly -vV | sed -n 's/^host: //p')
    if ! canary "$folder/canary" rustc +nightly -Zsanitizer=address; then
        skip "address sanitizer" "this nightly has none for $host" || return
    fi
    reports=$folder/reports
    rm -rf "$reports"
    mkdir -p "$reports"
    # In files: the tests' own child processes report too, and nobody reads what they say.
    options="log_path=$reports/report:detect_stack_use_after_return=1:strict_string_checks=1"
    ASAN_OPTIONS=$options "$folder/canary/canary" use >/dev/null 2>&1 || true
    grep -qs heap-use-after-free "$reports"/* || fail "the address sanitizer does not see memory that is used after it was freed"
    rm -f "$reports"/*
    ASAN_OPTIONS=$options:detect_leaks=1 "$folder/canary/canary" >/dev/null 2>&1 || true
    if grep -qs 'detected memory leaks' "$reports"/*; then
        options+=:detect_leaks=1
    else
        say "address sanitizer: no leaks are looked for, since that needs ptrace, which this sandbox does not permit"
        options+=:detect_leaks=0
    fi
    rm -f "$reports"/*

    local tests=(--lib --test region --test field_cases)
    # They take a minute or two each, and run without a sanitizer in every `make test`.
    [[ $1 != all ]] || tests+=(--test faults --test kill_points)
    # With a target, or the build scripts would be instrumented too; the flags then differ from every other build's.
    ASAN_OPTIONS=$options RUSTFLAGS=-Zsanitizer=address cargo +nightly test "${CARGO_FLAGS[@]}" \
        --target "$host" --target-dir "$folder" --features cuda,kill-points "${tests[@]}" || status=$?
    for report in "$reports"/*; do
        [[ -e $report ]] || continue
        found=$((found + 1))
        ((found > 5)) || cat "$report" >&2
    done
    say "address sanitizer: $found reports"
    ((status == 0 && found == 0))
}

valgrind_() {
    local folder=$TARGET/valgrind host runner
    command -v valgrind >/dev/null ||
        skip "valgrind" "it is not installed (\`apt-get install valgrind\`)" || return
    runner="valgrind --quiet --leak-check=full --errors-for-leak-kinds=definite,indirect"
    runner+=" --show-leak-kinds=definite,indirect --error-exitcode=99"
    canary "$folder" rustc
    for arguments in "" use; do
        # shellcheck disable=SC2086 # words on purpose
        if $runner "$folder/canary" $arguments >/dev/null 2>&1; then
            fail "valgrind does not see the ${arguments:-leak} that is there on purpose"
        fi
    done
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    # One thread: valgrind runs one at a time anyway, and tests that wait for one another would time out. It places
    # large mappings by itself, so the test of their place is not for it.
    env "CARGO_TARGET_${host}_RUNNER=$runner" cargo test "${CARGO_FLAGS[@]}" --features cuda \
        --lib --test region --test field_cases -- --test-threads=1 \
        --skip a_large_mapping_is_aligned_and_ends_with_the_file
}

# tolerant COMMAND...: what is skipped is no failure.
tolerant() {
    local status=0
    "$@" || status=$?
    ((status == SKIPPED)) || return "$status"
}

need_cargo
case $part in
address) address quick ;;
valgrind) valgrind_ ;;
all)
    failed=0
    # In subshells: `set -e` is off in a command that is tested.
    tolerant bash "$0" address-all || failed=1
    tolerant bash "$0" valgrind || failed=1
    exit "$failed"
    ;;
address-all) address all ;;
*) fail "no such part: \`$part\`" "one of: address, valgrind, all" ;;
esac
