#!/usr/bin/env bash
# The proof on a machine with a GPU and without a package registry: see README.md beside this file.
#   tests/gpu/run.sh OUT_FOLDER [--only PART …] [--seconds 480]
# Environment: PYTHON (python3), WHEELS (folder with wheels of what the machine lacks; .whl in the repository's root),
# FLASHINFER (folder that build_flashinfer.py has made; build/flashinfer).
set -euo pipefail

out=${1:?usage: tests/gpu/run.sh OUT_FOLDER [--only PART …] [--seconds 480]}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/.whl}
flashinfer=${FLASHINFER:-$root/build/flashinfer}
mkdir -p "$out"
out=$(cd "$out" && pwd)

work=$(mktemp -d /tmp/minisgl-gpu-XXXXXX) # short: sockets are in it
trap 'rm -rf "$work"' EXIT

# Those of "distribution module" lines on stdin that can not be imported are installed from a folder of wheels.
install_missing() {
    local missing=() distribution module
    while read -r distribution module; do
        "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" 2>/dev/null ||
            missing+=("$distribution")
    done
    ((${#missing[@]})) || return 0
    test -d "$1" || { echo "this machine lacks ${missing[*]}, and there is no folder of wheels at $1" >&2; return 2; }
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --find-links "$1" --target "$work/site" "${missing[@]}"
}

install_missing "$wheels" <<'NEEDS' || exit
msgspec msgspec
pyzmq zmq
safetensors safetensors
tokenizers tokenizers
jinja2 jinja2
tqdm tqdm
numpy numpy
NEEDS
path=$root:$root/tests:$work/site
if test -d "$flashinfer/site"; then # without it, that part fails alone
    install_missing "$flashinfer/wheels" <"$flashinfer/needs" || echo "without FlashInfer" >&2
    path=$path:$flashinfer/site
    export FLASHINFER_WORKSPACE_BASE=$work FLASHINFER_DISABLE_JIT=1
fi

export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TMPDIR=$work TRITON_CACHE_DIR=$work/triton XDG_CACHE_HOME=$work/cache TRITON_DEFAULT_FP_FUSION=1
"$python" "$root/tests/gpu/proof.py" "$out" "$@"
