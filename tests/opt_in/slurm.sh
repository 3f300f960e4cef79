#!/bin/sh
# Runs what `perdure launch slurm` writes under a Slurm of its own with two nodes, through what happens on
# clusters, and checks the run: see slurm_check.py.
#
#   tests/opt_in/slurm.sh [FOLDER for the logs]
#
# Needs root and Debian's slurm-wlm and munge, neither set up nor running. Everything runs in
# namespaces of its own (mounts, network, processes), which end with this script: nothing is left,
# however it ends.
set -eu

if [ "${1:-}" != inside ]; then
    for tool in slurmctld slurmd munged unshare; do
        PATH=$PATH:/usr/sbin command -v "$tool" > /dev/null || {
            echo "slurm.sh: $tool is missing; apt-get install slurm-wlm munge util-linux" >&2
            exit 2
        }
    done
    [ "$(id -u)" = 0 ] || {
        echo "slurm.sh: slurmd starts the processes of jobs, which needs root" >&2
        exit 2
    }
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/perdure-slurm-XXXXXX")
    trap 'status=$?; [ -z "${1:-}" ] || cp -r "$scratch/log/." "$1"; rm -rf "$scratch"; exit $status' EXIT
    trap 'exit 130' INT TERM
    [ -z "${1:-}" ] || mkdir -p "$1"
    unshare --mount --net --uts --pid --fork --kill-child --mount-proc "$0" inside "$scratch"
    exit
fi

scratch=$2
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/sbin" SLURM_CONF="$scratch/slurm.conf"
export PYTHON="${PYTHON:-$PWD/.venv/bin/python}" OMP_NUM_THREADS=1
export TORCH_CPP_LOG_LEVEL=ERROR # or it warns of addresses that have no names
ip link set lo up
hostname controller
# TEST-NET-1: where there is no address but 127.0.0.1, Slurm resolves none at all.
printf '127.0.0.1 localhost\n192.0.2.1 controller\n' > "$scratch/hosts"
for number in 1 2; do
    ip address add "192.0.2.1$number/32" dev lo
    echo "192.0.2.1$number node$number" >> "$scratch/hosts"
done
ip address add 192.0.2.1/32 dev lo
mount --bind "$scratch/hosts" /etc/hosts
mkdir "$scratch/log" "$scratch/state" "$scratch/munge" "$scratch/munge/key" "$scratch/munge/run"
mkdir -p /run/munge

# Munge insists on folders that only its own user may write to.
head -c 1024 /dev/urandom > "$scratch/munge/key/munge.key"
chmod 400 "$scratch/munge/key/munge.key"
chmod 700 "$scratch/munge/key"
chmod 755 "$scratch" "$scratch/munge" "$scratch/munge/run"
mount --bind "$scratch/munge/run" /run/munge
munged --foreground --force --key-file "$scratch/munge/key/munge.key" \
    --log-file "$scratch/munge/log" --pid-file "$scratch/munge/pid" --seed-file "$scratch/munge/seed" \
    > "$scratch/log/munged.log" 2>&1 &

# No cgroups, and no systemd: processes of a job are found as descendants of its slurmstepd.
# AuthInfo: a job waits for this long (by default two minutes) before it starts again.
cat > "$SLURM_CONF" << CONF
ClusterName=perdure
SlurmctldHost=controller
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$scratch/state
SlurmctldPidFile=$scratch/state/slurmctld.pid
SlurmdSpoolDir=$scratch/state/spool.%n
SlurmdPidFile=$scratch/state/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=node1 Port=6818 CPUs=2 State=UNKNOWN
NodeName=node2 Port=6819 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld -D > "$scratch/log/slurmctld.log" 2>&1 &

"$PYTHON" -m tests.opt_in.slurm_check "$scratch"
