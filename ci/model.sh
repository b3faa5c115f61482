#!/usr/bin/env bash
# Checks the model of the protocol in every configuration, optimised, and prints a line for each: states, depth, time.
# usage: ci/model.sh [PART OF A CONFIGURATION'S NAME]
source "$(dirname -- "$0")/lib.sh"
need_cargo
say "model: every state of every configuration${1:+ with \`$1\` in its name}; some minutes, less than 1 GiB"
MODEL_ONLY=${1:-} exec cargo test "${CARGO_FLAGS[@]}" --release --test model -- --ignored --nocapture --test-threads=1 exhaustive
