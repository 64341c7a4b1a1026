#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_headers.sh COMPILER INCLUDE GENERATED_INCLUDE
#
# Each public header compiles alone and without a warning: .hpp as C++20, .cuh as C++17 without
# CUDA, .h as C11 and as C++17. None pulls in a header of CUDA, NCCL, MPI, hwloc, the logging
# library or the like: only evmm's own, the standard library's and the system's.

set -euo pipefail
compiler=$1
include=$2
generated=$3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check() { # NAME LANGUAGE STANDARD
  local name=$1 language=$2 standard=$3
  local log=$work/${1//\//_}.$3
  # Twice: a missing include guard shows.
  printf '#include <%s>\n#include <%s>\n' "$name" "$name" |
    "$compiler" -x "$language" "-std=$standard" -Wall -Wextra -Wpedantic -Werror -fsyntax-only \
      -I "$include" -I "$generated" -MD -MF "$log.d" - >"$log" 2>&1 || {
    printf 'failed: %s does not compile alone as %s:\n' "$name" "$standard"
    cat "$log"
    return 1
  }
  local foreign
  foreign=$(tr -s ' \134' '\n' <"$log.d" |
    grep -E '(^|/)(cuda|nccl|mpi|hwloc|fmt|spdlog|nlohmann|CLI|gtest|gmock|benchmark|openmpi|nvtx3?)(/|[a-zA-Z_]*\.h)' |
    grep -vF "$include/" || true)
  if [ -n "$foreign" ]; then
    printf 'failed: %s pulls in what a user need not have:\n%s\n' "$name" "$foreign"
    return 1
  fi
}

check_one() {
  local name=$1
  case $name in
    *.hpp) check "$name" c++ c++20 ;;
    *.cuh) check "$name" c++ c++17 && check "$name" c++ c++20 ;;
    *.h) check "$name" c c11 && check "$name" c++ c++17 ;;
  esac
}
export -f check check_one
export compiler include generated work

names=$(cd "$include" && find . -name '*.hpp' -o -name '*.cuh' -o -name '*.h' | sed 's,^\./,,' | sort)
[ -n "$names" ] || {
  echo "failed: no header under $include"
  exit 1
}
# shellcheck disable=SC2016  # the inner shell expands it
printf '%s\n' "$names" |
  xargs -P "$(nproc)" -I '{}' bash -c 'set -uo pipefail; check_one "$1"' _ '{}'
printf '%s headers compile alone\n' "$(wc -l <<<"$names")"
