#!/usr/bin/env bash
# Smoke test of the engine on a machine with a GPU and without a package registry: see README.md beside this file.
#   tests/gpu/run.sh OUT_FOLDER [options of smoke.py]
# Environment: PYTHON (python3), WHEELS (folder with wheels of what the machine lacks; .whl in the repository's root).
set -euo pipefail

out=${1:?usage: tests/gpu/run.sh OUT_FOLDER}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/.whl}
mkdir -p "$out"
out=$(cd "$out" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

missing=()
for pair in msgspec:msgspec pyzmq:zmq; do
    "$python" -c "import ${pair#*:}" 2>/dev/null || missing+=("${pair%:*}")
done
if ((${#missing[@]})); then
    test -d "$wheels" || { echo "this machine lacks ${missing[*]}, and there is no folder of wheels at $wheels" >&2; exit 2; }
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links "$wheels" \
        --target "$work/site" "${missing[@]}"
fi

export PYTHONPATH="$root:$root/tests:$work/site${PYTHONPATH:+:$PYTHONPATH}"
export TMPDIR="$work" # the random model, 1.2 GB, goes with it
"$python" "$root/tests/gpu/smoke.py" "$out" "$@" 2>&1 | tee "$out/smoke.log"
