#!/usr/bin/env bash
# Runs tests and lints step by step, goes on after a failed one, and closes with a summary.
# usage: ci/test.sh all|lint|rust|python [PYTEST ARGUMENT...]
source "$(dirname -- "$0")/lib.sh"

part=${1:-all}
(($# == 0)) || shift
start=$SECONDS
names=() commands=() results=()

# add NAME COMMAND...: plans a step.
add() {
    names+=("$1")
    shift
    commands+=("${*@Q}")
}

add_lint_of_rust() {
    add "rustfmt" cargo fmt --all --check
    # Once for each set of features that somebody builds: the core alone, a Rust program with CUDA, the wheel.
    add "clippy (no features)" cargo clippy "${CARGO_FLAGS[@]}" --all-targets -- -D warnings
    add "clippy (cuda)" cargo clippy "${CARGO_FLAGS[@]}" --all-targets --features cuda -- -D warnings
    add "clippy (kill-points)" cargo clippy "${CARGO_FLAGS[@]}" --all-targets --features kill-points -- -D warnings
    add "clippy (python, cuda)" cargo clippy "${CARGO_FLAGS[@]}" --all-targets --features python,cuda -- -D warnings
    add "rustdoc" env RUSTDOCFLAGS="-D warnings" cargo doc "${CARGO_FLAGS[@]}" --no-deps --features cuda
}

add_tests_of_rust() {
    # Never with the feature `python`: an extension module leaves Python's symbols to the interpreter that loads it.
    add "cargo test (no features)" cargo test "${CARGO_FLAGS[@]}"
    add "cargo test (cuda)" cargo test "${CARGO_FLAGS[@]}" --features cuda
    add "cargo test (kill-points)" cargo test "${CARGO_FLAGS[@]}" --features kill-points --test kill_points
    add "address sanitizer" ci/sanitize.sh address
    # One round of each, unoptimised: that they still run, not how fast.
    add "benches as tests" cargo test "${CARGO_FLAGS[@]}" --bench '*'
    local example
    for example in examples/*.rs; do
        [[ ! -e $example ]] || add "example $(basename "$example" .rs)" \
            timeout 120 cargo run "${CARGO_FLAGS[@]}" --quiet --features cuda --example "$(basename "$example" .rs)"
    done
}

add_wheel() { add "wheel" ci/install.sh dev; }

add_lint_of_python() {
    add "ruff check" "$VENV_PYTHON" -m ruff check .
    add "ruff format" "$VENV_PYTHON" -m ruff format --check .
    add "mypy" "$VENV_PYTHON" -m mypy
    # -P, here and below: the installed wheel is what is looked at, and nothing in the current directory.
    add "stubtest" "$VENV_PYTHON" -P -m mypy.stubtest --allowlist ci/stubtest-allowlist.txt \
        --ignore-unused-allowlist ec_shared_region._core
}

add_tests_of_python() {
    # A test has a time limit of its own (pyproject.toml); this one is for a run that hangs between tests.
    local limit=()
    [[ ${CI:-} != true ]] || limit=(timeout --kill-after=30 2700)
    add "pytest" "${limit[@]}" "$VENV_PYTHON" -P -m pytest "$@"
}

case $part in
all)
    add_lint_of_rust
    add_tests_of_rust
    add_wheel
    add_lint_of_python
    add_tests_of_python "$@"
    ;;
lint)
    add_lint_of_rust
    add_wheel
    add_lint_of_python
    ;;
rust) add_tests_of_rust ;;
python)
    add_wheel
    add_tests_of_python "$@"
    ;;
*) fail "no such part of the tests: \`$part\`" "one of: all, lint, rust, python" ;;
esac

need_cargo
say "tools: $(cargo --version), $(rustc --version)"
if [[ $part == all || $part == lint ]]; then
    need_cargo_tool fmt rustfmt
    need_cargo_tool clippy clippy
fi
if [[ $part != rust ]]; then
    ci/env.sh build project demo dev
    # pyo3's build script asks an interpreter; one and the same for every step, or each would build pyo3 anew.
    export PYO3_PYTHON=$VENV_PYTHON
fi

passed=0 failed=0 skipped=0 wheel_failed=
for i in "${!names[@]}"; do
    name=${names[i]}
    say "[$((i + 1))/${#names[@]}] $name: ${commands[i]//\'/}"
    if [[ -n $wheel_failed && $name =~ ^(stubtest|pytest)$ ]]; then
        results+=("$(printf 'not run %14s  %s' "" "$name")")
        failed=$((failed + 1))
        say "$name: not run, since there is no wheel to run it on"
        continue
    fi
    step_start=$SECONDS
    status=0
    eval "${commands[i]}" || status=$?
    if ((status == 0)); then
        result=ok
        passed=$((passed + 1))
    elif [[ $status == 77 && ${commands[i]} == *ci/sanitize.sh* ]]; then
        result=skipped
        skipped=$((skipped + 1))
    else
        result="FAILED"
        failed=$((failed + 1))
        [[ $name != wheel ]] || wheel_failed=1
        say "$name: FAILED"
    fi
    results+=("$(printf '%-7s %14s  %s' "$result" "$(duration $((SECONDS - step_start)))" "$name")")
done

printf '\n%s, %s in all:\n' "ci/test.sh $part" "$(duration $((SECONDS - start)))"
printf '  %s\n' "${results[@]}"
printf 'steps: %d passed, %d failed%s\n' "$passed" "$failed" "$( ((skipped == 0)) || printf ', %d skipped' "$skipped")"
((failed == 0))
