#!/bin/sh
# Builds the Dockerfile and trains in the image, as a user without a name in it, on mounted folders.
#
#   tests/opt_in/image.sh [TORCH, as `docker build --build-arg`]
#
# Every step of the Dockerfile is run as it stands but FROM: no registry is asked. The base is Ubuntu
# 24.04 as debootstrap makes it, which has what the steps use of NVIDIA's image; its CUDA libraries
# are not tried, and there is no GPU. Needs root and Debian's buildah and debootstrap. SUITE, MIRROR:
# another base, such as Debian's trixie. MOUNTS: options for buildah, such as
# `--volume /opt/wheels:/opt/wheels:ro`.
set -eu
cd "$(dirname "$0")/../.."

for tool in buildah debootstrap setpriv; do
    command -v "$tool" > /dev/null || {
        echo "image.sh: $tool is missing; apt-get install buildah debootstrap util-linux" >&2
        exit 2
    }
done
[ "$(id -u)" = 0 ] || {
    echo "image.sh: debootstrap and buildah's mounts need root" >&2
    exit 2
}
user=12345 # has no entry in the image's /etc/passwd
scratch=$(mktemp -d "${TMPDIR:-/tmp}/perdure-image-XXXXXX")
buildah() { command buildah --root "$scratch/storage" --runroot "$scratch/run" "$@"; }
trap 'status=$?; buildah rm --all > /dev/null 2>&1; buildah rmi --all --force > /dev/null 2>&1; rm -rf "$scratch"; exit $status' EXIT
trap 'exit 130' INT TERM

case ${SUITE:=noble} in
noble)
    components=main,universe mirror=http://archive.ubuntu.com/ubuntu
    keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg script=/usr/share/debootstrap/scripts/gutsy
    ;;
*)
    components=main mirror=http://deb.debian.org/debian
    keys=/usr/share/keyrings/debian-archive-keyring.gpg script=/usr/share/debootstrap/scripts/sid
    ;;
esac
if [ -e "$keys" ]; then check="--keyring=$keys"; else check=--no-check-gpg; fi
debootstrap --variant=minbase --components="$components" "$check" \
    "$SUITE" "$scratch/base" "${MIRROR:-$mirror}" "$script" > "$scratch/log" ||
    { tail "$scratch/log" >&2; exit 1; }
base=$(buildah from scratch)
buildah copy --quiet "$base" "$scratch/base" /
buildah commit --quiet --rm "$base" base
rm -rf "$scratch/base"

# --format: OCI's own has no health checks.
# shellcheck disable=SC2086 # MOUNTS are several words
buildah build --format docker --isolation chroot --pull-never --from localhost/base ${MOUNTS:-} \
    ${1:+--build-arg "TORCH=$1"} --tag perdure .

mkdir -p "$scratch/data" "$scratch/runs"
find trainer -name '*.py' -exec cat {} + > "$scratch/data/text.txt"
chown -R "$user:$user" "$scratch/data" "$scratch/runs"
chmod 755 "$scratch"
image=$(buildah from perdure)
inside() {
    buildah run --isolation chroot --user "$user:$user" \
        --volume "$scratch/data:/perdure/data" --volume "$scratch/runs:/perdure/runs" \
        "$image" -- "$@"
}
inside sh -ec 'echo "user $(id -u), home $HOME: $(python -c "import getpass, torch; print(getpass.getuser(), torch.__version__)")"'
inside perdure data prepare data/text.txt --out data/text --tokenizer bytes
# --local-addr: docker, unlike buildah, makes the name of the container known in it.
inside torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m trainer recipes/quickstart.yaml \
    data.sources.0.path=data/text run.steps=4 schedule.warmup_steps=1 run.device=cpu \
    strategy.compile=true
inside perdure ckpt verify runs/quickstart
inside tini -- perdure doctor recipes/quickstart.yaml run.device=cpu
inside python -c 'import boto3, ctypes; ctypes.CDLL("libibverbs.so.1"); ctypes.CDLL("libmlx5.so.1")'
others=$(find "$scratch/data" "$scratch/runs" ! -uid "$user" | head)
[ -z "$others" ] || { echo "image.sh: not the user's: $others" >&2; exit 1; }
of() { buildah inspect --format "{{.Docker.Config.$1}}" "$image"; }
found="$(of Entrypoint) $(of User) $(of Healthcheck.Test)"
case $found in
'[tini -- perdure] 1000:1000 [CMD-SHELL test '*) ;;
*) echo "image.sh: $found" >&2; exit 1 ;;
esac
inside sh -ec "$(of 'Healthcheck.Test' | sed 's/^\[CMD-SHELL //; s/]$//')"
echo "built, trained and compiled as user $user on mounted folders; what it wrote belongs to that user"
