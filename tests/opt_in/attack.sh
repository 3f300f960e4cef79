#!/bin/sh
# Lets another user and another machine try to get into real runs: see attack.py.
#
#   tests/opt_in/attack.sh [FOLDER for the logs]
#
# Needs root, and the commands unshare, nsenter and ip. Everything runs in namespaces of its own
# (mounts, network, processes, shared memory), which end with this script: nothing is left, however
# it ends.
set -eu

if [ "${1:-}" != inside ]; then
    for tool in unshare nsenter ip; do
        PATH=$PATH:/usr/sbin command -v "$tool" > /dev/null || {
            echo "attack.sh: $tool is missing; apt-get install util-linux iproute2" >&2
            exit 2
        }
    done
    [ "$(id -u)" = 0 ] || {
        echo "attack.sh: machines and users to pretend take root" >&2
        exit 2
    }
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/perdure-attack-XXXXXX")
    trap 'status=$?; [ -z "${1:-}" ] || cp -r "$scratch/log/." "$1"; rm -rf "$scratch"; exit $status' EXIT
    trap 'kill -KILL "$inside"; exit 130' INT TERM # unshare ignores other signals
    [ -z "${1:-}" ] || mkdir -p "$1"
    unshare --mount --net --ipc --pid --fork --kill-child --mount-proc "$0" inside "$scratch" &
    inside=$!
    wait "$inside"
    exit
fi

scratch=$2
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/sbin" OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
ip link set lo up
mount -t tmpfs none /dev/shm
chmod 1777 /dev/shm
chmod 755 "$scratch" # strangers may look for what they can read
mkdir "$scratch/log"
exec "${PYTHON:-.venv/bin/python}" -m tests.opt_in.attack "$scratch"
