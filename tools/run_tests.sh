#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every test in the order in which a failure says most: style, then what needs nothing, then the real kernel.
# Extra arguments go to pytest: tools/run_tests.sh -x -k files
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"

# What this kernel offers comes first: it explains each skip below, and a skip for anything else is an error in CI.
if [ -f src/opendsec/client/cli/main.py ]; then
    .venv/bin/dsec doctor || true
fi

suites=()
for suite in style unit contract fuzz integration security; do
    if compgen -G "tests/$suite/test_*.py" >/dev/null || compgen -G "tests/$suite/*/test_*.py" >/dev/null; then
        suites+=("tests/$suite")
    fi
done
exec .venv/bin/python -m pytest --durations=15 "$@" "${suites[@]}"
