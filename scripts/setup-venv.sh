#!/bin/sh
# Make .venv and install torch and halfstep into it. Usage: scripts/setup-venv.sh [EXTRA...]
# Environment: PYTHON (default python3), VENV (default .venv), TORCH (default 2.13.0).
# Does nothing where the same installation has been made before.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH:-2.13.0}
extras=$(echo "$*" | tr ' ' ',')
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "setup: $*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "error: $python is $("$python" -V 2>&1); halfstep needs Python 3.11 or newer: set PYTHON=..."
  exit 2
}

want="$torch $(cat pyproject.toml scripts/setup-venv.sh | cksum)"
stamps="$venv/.installed-$extras"
[ -n "$extras" ] || stamps="$venv/.installed-*" # more extras will do as well
for stamp in $stamps; do
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0
done

# Debian's python3 comes without ensurepip; then the system's pip installs into the environment.
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" 2>/dev/null ||
  "$python" -m venv --without-pip "$venv"
if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
else
  pip() { "$python" -m pip --disable-pip-version-check --python "$venv/bin/python" "$@"; }
fi

has_nvidia() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# Whether installing torch from the default index would bring CUDA packages.
brings_cuda() {
  pip install --quiet --dry-run --report - "torch==$torch" 2>/dev/null |
    "$venv/bin/python" -c 'import json, sys
names = [i["metadata"]["name"].lower() for i in json.load(sys.stdin)["install"]]
sys.exit(not any(n.startswith(("nvidia-", "cuda-")) or n == "triton" for n in names))'
}

cpu_index_reachable() {
  "$venv/bin/python" - "$cpu_index/torch/" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).read(64)
PY
}

if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" 2>/dev/null; then
  :
elif [ "$(uname -s)" != Linux ] || has_nvidia; then
  say "installing torch $torch"
  pip install --quiet "torch==$torch" numpy
elif cpu_index_reachable; then
  say "installing torch $torch for CPU from $cpu_index"
  pip install --quiet "torch==$torch" --index-url "$cpu_index"
elif brings_cuda; then
  say "error: this machine has no NVIDIA GPU, $cpu_index cannot be reached, and the default index"
  say "would install gigabytes of CUDA. Install a CPU build of torch $torch into $venv yourself"
  say "($venv/bin/python -m pip install WHEEL), then run this again."
  exit 2
else
  say "installing torch $torch for CPU from the default index"
  pip install --quiet "torch==$torch"
fi

say "installing halfstep${extras:+ with $extras}"
# Named again, since packages such as torchvision would bring another torch with CUDA.
pip install --quiet --editable ".${extras:+[$extras]}" "torch==$torch"
printf '%s' "$want" >"$venv/.installed-$extras"
