#!/usr/bin/env bash
# Runs the criterion benches; arguments go on to cargo bench. Their report lies in target/criterion.
source "$(dirname -- "$0")/lib.sh"
need_cargo
say "bench: building and running the criterion benches"
# Without a name cargo would also start the library's own, empty harness, which knows none of criterion's options.
which=(--bench '*')
[[ " $* " != *" --bench"[\ =]* ]] || which=()
cargo bench "${CARGO_FLAGS[@]}" "${which[@]}" "$@"
say "bench: the report is \`target/criterion/report/index.html\`"
