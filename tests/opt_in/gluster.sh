#!/usr/bin/env bash
# `make gluster`: save to a GlusterFS volume, mounted from this machine, and prove from the trace that
# no more writers than allowed touch it. Needs root, /dev/fuse and Debian's glusterfs-server.
# Everything runs in namespaces of its own (mounts, network, processes) and ends with them.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ ${1:-} != inside ]]; then
    for tool in glusterd gluster unshare; do
        command -v "$tool" >/dev/null || { echo "error: $tool is missing: apt-get install glusterfs-server util-linux" >&2; exit 2; }
    done
    [[ $(id -u) = 0 && -e /dev/fuse ]] || { echo "error: needs root and /dev/fuse" >&2; exit 2; }
    bricks=$(mktemp -d "$PWD/.gluster-XXXXXX")
    trap 'rm -rf "$bricks"' EXIT
    unshare --mount --net --pid --fork --kill-child --mount-proc "$0" inside "$bricks" "$@"
    exit
fi

bricks=$2
shift 2
ip link set lo up
ip address add 10.0.0.1/32 dev lo  # gluster refuses the name localhost
mount -t tmpfs none /var/lib/glusterd
mount -t tmpfs none /var/log/glusterfs
mkdir -p /run/gluster "$bricks/brick" "$bricks/mount"
glusterd
until gluster pool list >/dev/null 2>&1; do sleep 0.2; done
gluster --mode=script volume create checkpoints "10.0.0.1:$bricks/brick" force
gluster --mode=script volume start checkpoints
mount -t glusterfs 10.0.0.1:/checkpoints "$bricks/mount"
.venv/bin/python -m benchmarks.writers --dir "$bricks/mount" "$@"
.venv/bin/python -m benchmarks.writers --dir "$bricks"
umount "$bricks/mount"
gluster --mode=script volume stop checkpoints force
