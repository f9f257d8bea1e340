#!/usr/bin/env bash
# On a GPU box, in the folder that tests/device/bundle.py made: ./run.sh [OUT.json]
# Needs CPython 3.11 to 3.13 and NVIDIA's driver of CUDA 13 (580 or later), see docs/cuda.md; no
# internet, no compiler. Under 8 minutes.
set -eu
started=$SECONDS
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/results.json}")
python=
for name in ${PYTHON:-python3.12 python3.13 python3.11 python3}; do
  tag=$("$name" -c 'import sys, venv; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if ls "$here"/wheels/numpy-*-"$tag"-*.whl >/dev/null 2>&1; then python=$name; break; fi
done
: "${python:?no CPython that the wheels are for; name one in PYTHON}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv --without-pip "$work/venv"  # Debian has ensurepip in a package of its own
pip=$(echo "$here"/wheels/pip-*.whl)
"$work/venv/bin/python" "$pip/pip" install --quiet --no-index --disable-pip-version-check \
  --find-links "$here/wheels" xpuc nvidia-cuda-runtime
PATH="$work/venv/bin:$PATH" python "$here/measure.py" "$here" "$out" "$((SECONDS - started))"
