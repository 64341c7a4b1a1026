#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds evmm and runs benchmarks. See --help.

source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench.sh [options] [area...] [-- arguments of Google Benchmark]

Installs what is missing with apt (as root or through sudo), builds the release preset and runs the
benchmarks of the named areas, of all there are when none is named. Each area prints a table and
leaves its numbers as JSON, and a plot where Python has matplotlib. The peers that this machine has
(cudaMalloc, cudaMallocAsync, ...) are measured in the same run. Works from any folder.

  --list          print the areas there are
  --ranks N       processes of the areas that are jobs; default: the GPUs, or 4 without
  --out DIR       where JSON, tables and plots go; default build/release/bench
  --no-plot       no plot, and no attempt to install what it needs
  -j, --jobs N    parallel compilations; default: all cores
  -h, --help      this text

Without a GPU the host driver is measured: its times say nothing about a GPU.
Example: scripts/bench.sh memory -- --benchmark_filter=create
TEXT
}

# Areas whose program is a job of several ranks, run under mpirun.
on_ranks=(symmetric heap windows ep)
wanted=()
list=false
plot=true
out=
ranks=
jobs=$(default_jobs)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --list) list=true ;;
    --no-plot) plot=false ;;
    --ranks)
      needs_value "$1" "$@"
      ranks=$2
      shift
      ;;
    --out)
      needs_value "$1" "$@"
      out=$(realpath -m -- "$2")
      shift
      ;;
    -j | --jobs)
      needs_value "$1" "$@"
      jobs=$2
      shift
      ;;
    -j[0-9]*) jobs=${1#-j} ;;
    --)
      shift
      break
      ;;
    -*) die_usage "unknown option '$1'; arguments of Google Benchmark follow --" ;;
    *) wanted+=("$1") ;;
  esac
  shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die_usage "-j takes a number from 1 up, not '$jobs'"

# The areas that there are: programs evmm_bench_AREA of tests/bench. Read from the sources, so that
# a mistyped one is known before anything is built.
mapfile -t areas < <(grep -ohE '^ *[a-z_]*\(evmm_bench_[a-z0-9_]+' \
  "$evmm_root/tests/bench/CMakeLists.txt" 2>/dev/null |
  sed 's/.*(evmm_bench_//' | grep -vx support | awk '!seen[$0]++')
if $list; then
  [ ${#areas[@]} -eq 0 ] || printf '%s\n' "${areas[@]}"
  exit 0
fi
[ ${#areas[@]} -gt 0 ] || die "there is no benchmark yet"
[ ${#wanted[@]} -gt 0 ] || wanted=("${areas[@]}")
for area in "${wanted[@]}"; do
  [[ " ${areas[*]} " == *" $area "* ]] ||
    die_usage "no benchmarks for the area '$area'; there are: ${areas[*]}"
done

[[ $ranks =~ ^([1-9][0-9]*)?$ ]] || die_usage "--ranks takes a number from 1 up, not '$ranks'"
if [ -z "$ranks" ]; then
  ranks=4
  if gpu_present; then ranks=$(nvidia-smi -L | grep -c '^GPU '); fi
fi

ensure_packages
targets=()
for area in "${wanted[@]}"; do targets+=("evmm_bench_$area"); done
build_preset release "$jobs" "${targets[@]}" || exit 1
mpi_environment
out=${out:-$evmm_root/build/release/bench}
mkdir -p "$out"

plots=false
if $plot && [ -f "$evmm_root/scripts/plot_bench.py" ]; then
  if ! { have python3 && python3 -c 'import matplotlib' 2>/dev/null; }; then
    # A plot is worth a try, and its absence no failure.
    (apt_install python3 python3-matplotlib) || warn "no matplotlib: there will be no plots"
  fi
  # Another Python may come first in PATH than the one that apt serves.
  for python in python3 /usr/bin/python3; do
    if "$python" -c 'import matplotlib' 2>/dev/null; then
      plots=true
      break
    fi
  done
fi

failures=()
for area in "${wanted[@]}"; do
  json=$out/$area.json
  launch=()
  if [[ " ${on_ranks[*]} " == *" $area "* ]]; then
    launch=(mpirun -np "$ranks" --oversubscribe --bind-to none)
  fi
  say "measuring $area"
  if ! "${launch[@]}" "$evmm_root/build/release/bin/evmm_bench_$area" \
    --benchmark_color=false --benchmark_out="$json" --benchmark_out_format=json "$@" </dev/null |
    tee "$out/$area.txt"; then
    warn "the benchmarks of $area failed; what they said is above"
    failures+=("$area")
    continue
  fi
  say "$area: table $out/$area.txt, numbers $json"
  if $plots; then
    if "$python" "$evmm_root/scripts/plot_bench.py" "$json" "$out/$area.svg"; then
      say "$area: plot $out/$area.svg"
    else
      warn "no plot of $area: scripts/plot_bench.py failed"
      failures+=("$area (plot)")
    fi
  fi
done
[ ${#failures[@]} -eq 0 ] || die "failed: ${failures[*]}"
