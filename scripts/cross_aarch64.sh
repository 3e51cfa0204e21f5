#!/usr/bin/env bash
# Builds the native core and the kernel tests for AArch64, runs them under qemu, and compares the checksums of
# their results with those of the AVX2 kernels of this machine: the two must agree in every bit.
#
# Needs an x86-64 machine with g++-aarch64-linux-gnu and qemu-user-static (Debian, Ubuntu), and `make build` before.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static cmake ninja; do
  command -v "$tool" >/dev/null || {
    echo "error: no $tool in PATH" >&2
    echo "hint: apt-get install g++-aarch64-linux-gnu qemu-user-static; make build (cmake and ninja)" >&2
    exit 3
  }
done

build() { # build DIRECTORY [CMAKE OPTION...]
  local directory=$1
  shift
  cmake -S native -B "$directory" -G Ninja -DHOTSET_KERNEL_TESTS=ON "$@" >/dev/null
  cmake --build "$directory" -j 2
}

build build/kernel-tests
build build/kernel-tests-aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/native/toolchains/aarch64-linux-gnu.cmake"

build/kernel-tests/kernel_tests --isa avx2 --checksums build/checksums-avx2.txt >build/kernel-tests/avx2.log || {
  grep -v '^ok' build/kernel-tests/avx2.log >&2
  exit 1
}
qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu \
  build/kernel-tests-aarch64/kernel_tests --checksums build/checksums-neon.txt

if ! diff build/checksums-avx2.txt build/checksums-neon.txt >&2; then
  echo "error: the AVX2 and the NEON kernels disagree (< AVX2, > NEON)" >&2
  exit 1
fi
echo "$(wc -l <build/checksums-neon.txt) results have the same bits on AVX2 and NEON"
