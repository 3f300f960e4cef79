#!/bin/sh
# Trains in gs:// and az:// against Google's storage-testbench and Azurite: see buckets.py.
#
#   tests/opt_in/buckets.sh [pytest's options]
#
# Needs npm, git and root. Everything is installed in .venv/buckets (250 MB).
set -eu
cd "$(dirname "$0")/../.."

folder=$PWD/.venv/buckets
if [ ! -e "$folder/installed" ]; then
    python=${PYTHON:-.venv/bin/python}
    "$python" -m pip install -q --target "$folder/python" gcsfs==2026.10.1 adlfs==2026.8.0
    npm install --silent --prefix "$folder" azurite@3.37.0
    "$python" -m venv "$folder/google"
    "$folder/google/bin/pip" install -q "${TESTBENCH_SOURCE:-git+https://github.com/googleapis/storage-testbench@e8c8507}"
    touch "$folder/installed"
fi
export AZURITE="$folder/node_modules/.bin/azurite-blob" TESTBENCH="$folder/google/bin/storage-testbench"
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$folder/python"
exec "${PYTHON:-.venv/bin/python}" -m pytest tests/opt_in/buckets.py "$@"
