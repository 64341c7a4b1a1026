#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Layout and static checks. See --help.

source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/lint.sh [options] [file...]

Checks the layout of all C++ and CUDA files with clang-format, the shell scripts with shellcheck,
and with clang-tidy the named .cpp files, or those that differ from the branch `main`. A tool that
is not installed is left out, and that is said; nothing is installed.

  --fix           let clang-format rewrite the files instead of complaining
  --all           clang-tidy on every .cpp file of lib, comm and examples (minutes)
  --no-tidy       no clang-tidy
  -j, --jobs N    files in parallel; default: all cores
  -h, --help      this text

clang-tidy reads build/dev/compile_commands.json: configure the dev preset first.
TEXT
}

fix=false
all=false
tidy=true
files=()
jobs=$(default_jobs)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --fix) fix=true ;;
    --all) all=true ;;
    --no-tidy) tidy=false ;;
    -j | --jobs)
      needs_value "$1" "$@"
      jobs=$2
      shift
      ;;
    -j[0-9]*) jobs=${1#-j} ;;
    -*) die_usage "unknown option '$1'" ;;
    *) files+=("$(realpath -- "$1")") || die_usage "no file '$1'" ;;
  esac
  shift
done
cd "$evmm_root"
failed=false

# Files of git where there is a repository, else those of the folders.
tracked() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -co --exclude-standard -- "$@" | while read -r file; do
      [ ! -f "$file" ] || printf '%s\n' "$file"
    done
  else
    local -a names=()
    local pattern
    for pattern in "$@"; do names+=(-o -name "${pattern##*/}"); done
    find lib include comm examples tests scripts .ci -type f \( "${names[@]:1}" \)
  fi
}

if have clang-format; then
  mapfile -t sources < <(tracked '*.cpp' '*.hpp' '*.cu' '*.cuh' '*.h')
  say "clang-format: ${#sources[@]} files"
  if $fix; then
    clang-format -i "${sources[@]}"
  else
    clang-format --dry-run -Werror "${sources[@]}" || failed=true
  fi
else
  say "clang-format is not installed: layout not checked"
fi

if have shellcheck; then
  mapfile -t scripts < <(tracked '*.sh' '.ci/run')
  say "shellcheck: ${#scripts[@]} files"
  shellcheck -x -P scripts "${scripts[@]}" || failed=true
else
  say "shellcheck is not installed: scripts not checked"
fi

if $tidy && have clang-tidy; then
  if [ ${#files[@]} -eq 0 ]; then
    if $all; then
      mapfile -t files < <(tracked 'lib/*.cpp' 'comm/*.cpp' 'examples/*.cpp')
    else
      since=$(git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
      mapfile -t files < <(git diff --name-only --diff-filter=d "$since" -- '*.cpp')
    fi
  fi
  database=build/dev/compile_commands.json
  if [ ${#files[@]} -eq 0 ]; then
    say "clang-tidy: no changed .cpp file"
  elif [ ! -f "$database" ]; then
    say "clang-tidy: no $database; configure first: cmake --preset dev"
    failed=true
  else
    say "clang-tidy: ${#files[@]} files"
    arguments=(-p build/dev --quiet --warnings-as-errors='*')
    version=$(clang-tidy --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -n 1)
    if [ "$version" -lt 16 ]; then
      arguments+=(--extra-arg=-include "--extra-arg=$evmm_root/scripts/tidy/source_location.hpp")
    fi
    printf '%s\0' "${files[@]}" |
      xargs -0 -n 1 -P "$jobs" clang-tidy "${arguments[@]}" || failed=true
  fi
elif $tidy; then
  say "clang-tidy is not installed: no static checks"
fi

if $failed; then die "something above is to be mended"; fi
say "nothing to mend"
