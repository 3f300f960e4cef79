#!/bin/bash
# Trains {{ job.recipe }} on machines without a scheduler. Written by:
#
#   {{ job.written_by }}
#
{% if job.most == 1 %}
# Run it in the folder in which the recipe's relative paths begin. Ctrl-C, SIGTERM and the end of the
# terminal save and leave; the same script continues from there.

{% else %}
{% if job.secret %}
# Run it on each machine, in a folder with a file `secret`, the same on all of them, that only you may
# read:
#
#   (umask 077; openssl rand -hex 32 > secret)     once; then copy it
#
{% else %}
# Run it on each machine, in the folder in which the recipe's relative paths begin, on a filesystem
# that all of them share:
#
{% endif %}
#   {{ job.file }} store             once, on a machine that stays
#   {{ job.file }} HOST:29400        on each node, whenever it is there; HOST runs the store
#
# Nodes may come and go. The same command continues where the run stopped.

{% endif %}
{% if keys %}
# The keys of the bucket are not written here. They are looked for in the environment and your home:
#
{% for line in keys.values() %}
#   {{ line }}
{% endfor %}

{% endif %}
{% if job.secret %}
export PERDURE_SECRET_FILE=${PERDURE_SECRET_FILE:-secret}
{% endif %}
{% if interface %}
# gloo and NCCL open their sockets on the fast network. NCCL finds InfiniBand by itself.
export GLOO_SOCKET_IFNAME={{ interface }} NCCL_SOCKET_IFNAME={{ interface }}
{% endif %}
bin={{ programs | shell }}
{% if job.most > 1 %}
if [ "${1:-}" = store ]; then
    exec "$bin/perdure" store --port 29400
fi
{% endif %}
# `perdure train` starts the same with fewer words, and checks the recipe first.
exec "$bin/torchrun" --rdzv-backend perdure --rdzv-endpoint {{ '127.0.0.1:0' if job.most == 1 else '"${1:?HOST:29400, or: store}"' }} \
    --nnodes {{ "%d:%d" % (job.least, job.most) }} --nproc-per-node {{ job.ranks or ("gpu" if job.gpus else 2) }} --max-restarts 1000000 \
    -m trainer {{ job.words | map("shell") | join(" ") }}
