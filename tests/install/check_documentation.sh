#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_documentation.sh DOXYGEN SOURCE OUTPUT
#
# The public headers give no Doxygen warning, and every class, struct and enumeration says what it
# is. Members need no comment where their name says it all.

set -euo pipefail
doxygen=$1
source=$2
output=$3

if [ ! -x "$doxygen" ]; then
  echo "skipped: doxygen is not installed"
  exit 77
fi
mkdir -p "$output"
cd "$source"
{
  cat scripts/Doxyfile
  printf 'OUTPUT_DIRECTORY = "%s"\n' "$output"
} | "$doxygen" - >"$output/log" 2>&1 || {
  cat "$output/log"
  exit 1
}
if grep -E '(warning|error): ' "$output/log" | grep -vE ': Member .* is not documented\.$'; then
  echo "failed: the documentation of the public headers has the faults above"
  exit 1
fi
echo "the documentation of the public headers is in order"
