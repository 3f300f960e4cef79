#!/bin/sh
# Build the fake CUDA runtime and run a command on it: VENV has a CUDA build of torch, and perdure.
# usage: VENV=.venv/fake-cuda-2.14.1 tests/fake_cuda/run.sh python -m pytest tests/fake_cuda
set -eu
here=$(cd "$(dirname "$0")" && pwd)
VENV=$(cd "$VENV" && pwd)
libraries=$VENV/fake
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
includes="-I$site/nvidia/cu13/include -I$site/nvidia/nccl/include"
torch="$site/torch"
mkdir -p "$libraries"

build() {  # SOURCE LIBRARY FLAGS…
    source=$here/$1 library=$libraries/$2
    shift 2
    if [ ! "$library" -nt "$source" ]; then
        echo "building $library"
        # shellcheck disable=SC2086
        ${CXX:-g++} -std=c++20 -shared -fPIC -pthread -o "$library.new" "$source" $includes "$@"
        mv "$library.new" "$library"
    fi
}
build runtime.cpp libfakecuda.so -O1 -ldl
build kernels.cpp libfakekernels.so -O0 -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
    -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda
ln -sf libfakecuda.so "$libraries/libcuda.so.1"
ln -sf libfakecuda.so "$libraries/libnvidia-ml.so.1"

# torch loads the kernels by itself; packages are what it finds of others.
printf '%s\n' "$(dirname "$(dirname "$here")")" "$here/packages" > "$site/fake_cuda.pth"
mkdir -p "$site/fake_cuda-1.dist-info"
printf 'Metadata-Version: 2.1\nName: fake-cuda\nVersion: 1\n' > "$site/fake_cuda-1.dist-info/METADATA"
printf '[torch.backends]\nfake_cuda = tests.fake_cuda.backend:load\n' \
    > "$site/fake_cuda-1.dist-info/entry_points.txt"

# torch then counts GPUs without a context, which forks of a process could not have.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# Compiled kernels would do nothing.
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 FAKE_CUDA="${FAKE_CUDA:-early}"
export FAKE_CUDA_LIBRARIES="$libraries" PATH="$VENV/bin:$PATH"
export LD_LIBRARY_PATH="$libraries" LD_PRELOAD="$libraries/libfakecuda.so"
exec "$@"
