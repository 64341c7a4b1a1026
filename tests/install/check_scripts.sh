#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: check_scripts.sh SOURCE WORK
# The scripts find their repository from any folder, whatever CDPATH says, where a path has a blank
# in it, and through symbolic links. The demonstration takes arguments of the example as they are,
# and a plot is there where one is told of.
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

# The demonstration, with programs in place of those that it starts.
mkdir -p "$2/programs" "$2/shared/routing"
for program in dpkg-query cmake mpirun nvidia-smi; do
  cat >"$2/programs/$program" <<'TEXT'
#!/usr/bin/env bash
case ${0##*/} in
  dpkg-query) printf installed ;;
  cmake) echo 'cmake version 3.25.1' ;;
  mpirun) printf '%s\n' "started $*" 'verified: as far as it goes' ;;
  nvidia-smi) exit 1 ;;
esac
TEXT
  chmod +x "$2/programs/$program"
done
: >"$2/shared/routing/model_a_top4.csv.gz"
work=$2
demo() { # ARGUMENTS...: what the example is given
  PATH=$work/programs:$PATH "$copy/scripts/demo.sh" "$@" | sed -n 's/^started //p'
}
expect_once() { # OPTION ARGUMENTS...
  local got
  got=$(demo "${@:2}")
  [ "$(grep -oe "$1" <<<"$got" | wc -l)" = 1 ] || {
    printf 'demo.sh %s: not once %s: %s\n' "${*:2}" "$1" "$got"
    exit 1
  }
}
for option in --picture --json --tokens --routing; do
  expect_once "$option" --ranks 2
  expect_once "$option" -- "$option" mine
  expect_once "$option" -- "$option=mine"
done
# The example refuses these beside a routing.
for option in --skew --top-k --experts; do
  got=$(demo -- "$option" 2)
  [[ $got == *"$option 2"* && $got != *--routing* ]] || {
    printf 'demo.sh -- %s 2: %s\n' "$option" "$got"
    exit 1
  }
done

# Nothing to plot: no plot, and a code that says so.
printf '{"benchmarks":[{"name":"a/bytes:1","error_occurred":true}]}' >"$2/skipped.json"
: >"$2/none.json"
if command -v python3 >/dev/null; then
  for results in skipped none; do
    code=0
    python3 "$copy/scripts/plot_bench.py" "$2/$results.json" "$2/plot.svg" 2>/dev/null || code=$?
    [ "$code" = 3 ] || {
      printf 'plot_bench.py with %s.json: exit code %s\n' "$results" "$code"
      exit 1
    }
  done
fi
