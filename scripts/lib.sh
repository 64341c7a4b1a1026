# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the scripts of this folder share. Source it; it needs bash and coreutils only.

set -euo pipefail

unset CDPATH # with it, cd goes elsewhere and says so
evmm_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
evmm_program=$(basename -- "$0")

say() { printf '%s: %s\n' "$evmm_program" "$*"; }
warn() { printf '%s: %s\n' "$evmm_program" "$*" >&2; }
die() {
  warn "$*"
  exit 1
}
# For mistakes on the command line.
die_usage() {
  warn "$*"
  warn "try $evmm_program --help"
  exit 2
}
# Value of an option: needs_value --preset "$@" fails when nothing follows.
needs_value() { [ $# -ge 3 ] || die_usage "$1 needs a value"; }

have() { command -v -- "$1" >/dev/null 2>&1; }

# --- packages -------------------------------------------------------------------------------------
# A package counts as present when dpkg says so, or when the thing itself is there: a machine may
# have CMake, MPI or a library from elsewhere.

# package, then `program NAME` or `header NAME`
evmm_packages='
g++                  program c++
cmake                program cmake
ninja-build          program ninja
pkg-config           program pkg-config
libhwloc-dev         header  hwloc.h
libopenmpi-dev       program mpicxx
openmpi-bin          program mpirun
libgtest-dev         header  gtest/gtest.h
libgmock-dev         header  gmock/gmock.h
libbenchmark-dev     header  benchmark/benchmark.h
libfmt-dev           header  fmt/format.h
libspdlog-dev        header  spdlog/spdlog.h
libcli11-dev         header  CLI/CLI.hpp
nlohmann-json3-dev   header  nlohmann/json.hpp
zlib1g-dev           header  zlib.h
'

installed_by_dpkg() {
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

header_present() {
  local prefix
  local -a prefixes
  IFS=':;' read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    [ -z "$prefix" ] || [ ! -e "$prefix/include/$1" ] || return 0
  done
  have "${CXX:-c++}" &&
    printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
    "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null
}

# Prints the packages that are needed and missing, one a line.
missing_packages() {
  local package kind thing
  while read -r package kind thing; do
    if [ -z "$package" ] || installed_by_dpkg "$package"; then
      continue
    fi
    case $kind in
      program) have "$thing" || printf '%s\n' "$package" ;;
      header) header_present "$thing" || printf '%s\n' "$package" ;;
    esac
  done <<<"$evmm_packages"
}

# Installs the named packages with apt, or says which command would.
apt_install() {
  [ $# -gt 0 ] || return 0
  local -a as_root=()
  local command="apt-get update && apt-get install -y --no-install-recommends $*"
  have apt-get ||
    die "missing: $*. This system has no apt-get; install what those Debian packages hold."
  if [ "$(id -u)" -ne 0 ]; then
    # A prompt for the password is of use only where somebody can answer it.
    if have sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      die "missing: $*. They need root to install, as: sudo sh -c '$command'"
    fi
  fi
  say "installing what is missing: $*"
  local -a apt=(${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive
    apt-get -q -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update </dev/null ||
    warn "apt-get update failed; trying with the package lists that are here"
  "${apt[@]}" install -y --no-install-recommends "$@" </dev/null ||
    die "apt-get could not install: $*. Its messages are above; by hand: $command"
}

# Everything that building and testing needs.
ensure_packages() {
  local -a missing
  mapfile -t missing < <(missing_packages)
  if [ ${#missing[@]} -eq 0 ]; then
    say "all packages are in place"
  else
    apt_install "${missing[@]}"
  fi
  local version
  version=$(cmake --version | sed -n '1s/^cmake version \([0-9.]*\).*/\1/p')
  [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n 1)" = 3.25 ] ||
    die "cmake $version ($(command -v cmake)) is too old; 3.25 or later is needed." \
      "Debian 12 and Ubuntu 24.04 have it: apt-get install cmake"
}

# --- building -------------------------------------------------------------------------------------

default_jobs() { nproc 2>/dev/null || printf '2\n'; }

# build_preset PRESET JOBS [TARGET...]: configures and builds; false when that failed. The output
# is shown, and kept in build/PRESET/build.log.
build_preset() {
  local preset=$1 jobs=$2
  shift 2
  local tree=$evmm_root/build/$preset
  local -a configure=(cmake --preset "$preset") build=(cmake --build "$tree" -j "$jobs")
  [ $# -eq 0 ] || build+=(--target "$@")
  mkdir -p "$tree" || return 1
  # A tree that was copied or moved here belongs to another source folder: start it afresh.
  if [ -f "$tree/CMakeCache.txt" ] &&
    ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$evmm_root" "$tree/CMakeCache.txt"; then
    configure+=(--fresh)
  fi
  # nvcc is often installed and not in PATH.
  if ! have nvcc && [ -x /usr/local/cuda/bin/nvcc ]; then
    PATH=$PATH:/usr/local/cuda/bin
  fi
  say "building build/$preset with $jobs jobs"
  if ! (cd "$evmm_root" && "${configure[@]}" && "${build[@]}") 2>&1 | tee "$tree/build.log"; then
    warn "building the $preset preset failed; everything it said is in $tree/build.log"
    return 1
  fi
}

# Ranks share this machine's cores, maybe as root in a container: settings of Open MPI that let
# them. Whatever the caller has set stays.
mpi_environment() {
  export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}
  export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
  export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
  if [ "$(id -u)" -eq 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # Without ssh Open MPI 4 refuses to start even ranks of this machine, unless told to stay here.
  if ! have ssh && ! have rsh; then
    export OMPI_MCA_plm=${OMPI_MCA_plm:-isolated}
  fi
}

gpu_present() { have nvidia-smi && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
