#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: check_scripts.sh SOURCE WORK
# The scripts find their repository from any folder, whatever CDPATH says, where a path has a blank
# in it, and through symbolic links.
set -euo pipefail

source=$1
copy="$2/a copy"

rm -rf "$2"
mkdir -p "$copy/tests/bench"
cp -r "$source/scripts" "$copy/"
cp "$source/tests/bench/CMakeLists.txt" "$copy/tests/bench/"

expected=$("$source/scripts/bench.sh" --list)
[ -n "$expected" ]
check() { # FOLDER SCRIPT
  local listed
  listed=$(cd -- "$1" && "$2" --list)
  [ "$listed" = "$expected" ] || {
    printf '%s --list from %s with CDPATH=%s: %s\n' "$2" "$1" "${CDPATH:-}" "$listed"
    exit 1
  }
}
check "$copy" scripts/bench.sh
check "$copy/scripts" ./bench.sh
check / "$copy/scripts/bench.sh"
export CDPATH=.:/
check "$copy" scripts/bench.sh

mkdir -p "$2/links"
ln -s "$copy/scripts/bench.sh" "$2/links/first"
ln -s first "$2/links/second"
check / "$2/links/second"
check "$2/links" ./first

for script in demo test bench lint; do
  "$copy/scripts/$script.sh" --help >/dev/null
  ln -s "../a copy/scripts/$script.sh" "$2/links/$script.sh"
  "$2/links/$script.sh" --help >/dev/null
done
