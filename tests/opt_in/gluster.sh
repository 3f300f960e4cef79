#!/bin/sh
# Saves from four nodes to a local disk and to a mounted GlusterFS volume, and proves from the trace
# who wrote when.
#
#   tests/opt_in/gluster.sh [options of benchmarks.writers]
#
# Needs root, /dev/fuse and Debian's glusterfs-server. Everything runs in namespaces of its own
# (mounts, network, processes), which end with this script: nothing is left, however it ends, and
# the servers, which listen on all addresses, are not reachable from outside.
set -eu

if [ "${1:-}" != inside ]; then
    for tool in glusterd gluster unshare; do
        command -v "$tool" > /dev/null || {
            echo "gluster.sh: $tool is missing; apt-get install glusterfs-server util-linux" >&2
            exit 2
        }
    done
    [ "$(id -u)" = 0 ] && [ -c /dev/fuse ] || {
        echo "gluster.sh: mounting needs root and /dev/fuse" >&2
        exit 2
    }
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/perdure-gluster-XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 130' INT TERM
    unshare --mount --net --pid --fork --kill-child --mount-proc "$0" inside "$scratch" "$@"
    exit
fi

scratch=$2
shift 2
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
address=192.0.2.1 # TEST-NET-1: Gluster refuses 127.0.0.1 as the address of a brick
ip link set lo up
ip address add "$address/32" dev lo
for directory in /var/lib/glusterd /var/log/glusterfs /run/gluster; do
    mkdir -p "$directory" "$scratch$directory"
    mount --bind "$scratch$directory" "$directory"
done
mkdir -p "$scratch/brick" "$scratch/mount"

glusterd
volume() { gluster --mode=script volume "$@"; }
for _ in 1 2 3 4 5 6 7 8 9 10; do
    volume list > /dev/null 2>&1 && break
    sleep 1
done
volume create perdure "$address:$scratch/brick" force
volume start perdure
mount -t glusterfs "$address:/perdure" "$scratch/mount"
volume profile perdure start > /dev/null

"$python" -m benchmarks.writers --dir "$scratch"
"$python" -m benchmarks.writers --dir "$scratch/mount" "$@" || {
    status=$?
    grep -h '] [EC] \[' "$scratch"/var/log/glusterfs/*.log >&2 || true
    exit $status
}

echo
echo "Operations that the brick counted:"
volume profile perdure info cumulative | awk '/Cumulative/ {on = 1} on && $NF ~ /^[A-Z]+$/ {print "  " $NF, $(NF - 1)}'
