#!/usr/bin/env bash
# Judge the kernels on the GPU of this machine, the reference beside them, and time the kernels: one command, no network.
#
#   ci/gpu.sh [OUT]        writes OUT, by default ci/results/<device>/<date>/
#
# PYTHON is the interpreter that has torch, triton, safetensors, pytest and hypothesis; by default .venv's where there is
# one.  Nothing is installed.  Exit codes: 0 everything conforms; 1 something does not, see OUT; 2 it could not be run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi

refuse() {
    echo "ci/gpu.sh: $1" >&2
    exit 2
}

command -v "$PYTHON" >/dev/null || refuse "no interpreter $PYTHON"
device=$("$PYTHON" -c '
import torch
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
' 2>/dev/null) || refuse "$PYTHON cannot import torch"
[ -n "$device" ] || refuse "no GPU found: torch.cuda.is_available() is false for $PYTHON"
missing=$("$PYTHON" -c '
import importlib.util
needed = ("triton", "numpy", "safetensors", "jsonschema", "typer", "rich", "jinja2", "pytest", "pytest_timeout", "hypothesis")
print(", ".join(name for name in needed if importlib.util.find_spec(name) is None))
')
[ -z "$missing" ] || refuse "$PYTHON lacks $missing"

out=${1:-ci/results/$(echo "$device" | tr -c 'A-Za-z0-9\n' '-')/$(date -u +%Y-%m-%d-%H%M%S)}
mkdir -p "$out" || refuse "cannot write $out"

# Compiled whatever the caller's environment says: a GPU run must not be an interpreted one.
export TRITON_INTERPRET=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

{
    date -u
    git rev-parse HEAD 2>/dev/null
    "$PYTHON" -c '
import platform, numpy, torch, triton
print("python", platform.python_version(), "numpy", numpy.__version__)
print("torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda, "hip", torch.version.hip)
print("device", torch.cuda.get_device_properties(0))
'
    command -v nvidia-smi >/dev/null && nvidia-smi
    command -v rocm-smi >/dev/null && rocm-smi
} >"$out/versions.txt" 2>&1

failed=0

# A step runs to its end whatever the one before it found; what each said is kept.
step() {
    local name=$1
    shift
    echo "==> $name"
    "$@" >"$out/$name.txt" 2>&1
    local code=$?
    tail -n 3 "$out/$name.txt"
    echo "$name $code" >>"$out/exit-codes.txt"
    [ "$code" -eq 0 ] || failed=1
}

: >"$out/exit-codes.txt"
for target in optimized reference; do
    step "check-$target" "$PYTHON" -m conformance check "$target" --level full \
        --json "$out/$target.jsonl" --junit "$out/$target.xml" --html "$out/$target.html"
done
step bench "$PYTHON" -m conformance bench --target optimized --against reference \
    --json "$out/bench.json" --html "$out/bench.html"
step tests "$PYTHON" -m pytest -p no:cacheprovider tests/optimized
# The memory checker makes every access slow: the small cases only.
if command -v compute-sanitizer >/dev/null; then
    step memory compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all \
        "$PYTHON" -m conformance smoke optimized
else
    echo "compute-sanitizer is not installed: memory not checked" | tee "$out/memory.txt"
fi

echo "results: $out"
exit "$failed"
