#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds evmm and runs benchmarks. See --help.

source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

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

Without a GPU the host driver is measured: its times say nothing about a GPU. `ep` needs GPUs;
EVMM_ROUTING names its recorded routings, a file or a folder of *.csv.gz.
Example: scripts/bench.sh memory -- --benchmark_filter=create
TEXT
}

# Areas whose program is a job of several ranks, run under mpirun.
on_ranks=(symmetric heap nccl nodes ep)

# The plots of an area, one a line: what the file's name ends in (- for nothing), then options of
# plot_bench.py.
plots_of() {
  case $1 in
    allocator)
      echo '- --filter ^pair/ --title alloc+free'
      echo '_own_streams --filter ^own_streams/ --argument threads --metric items_per_second --title pairs/s'
      echo '_shared_stream --filter ^shared_stream/ --argument threads --metric items_per_second --title pairs/s'
      ;;
    ep)
      echo '_tokens --filter ^ep/(dispatch_(fp8|bf16)|combine|nccl_[a-z0-9_]+)(/sms:24)?$ --argument tokens --metric median_us --title throughput'
      echo '_low_latency --filter ^ep/(low_latency_[a-z]+_fp8(_by_expert)?|nccl_combine|nccl_dispatch_fp8)(/sms:24)?$ --argument tokens --metric median_us --title low-latency'
      echo '_sms --filter ^ep/(dispatch_(fp8|bf16)|combine)/tokens:(4096|8192)$ --argument sms --metric physical_GBps --title multiprocessors --linear'
      echo '_spill --filter ^ep/ --argument spill --metric logical_GBps --title rows-in-host-memory --linear'
      ;;
    *) echo '-' ;;
  esac
}

# What stands below an area's table: figures of peers that cannot be run here.
references_of() {
  case $1 in
    ep)
      echo
      cat "$evmm_root/tests/bench/results/h200x4_deepep.txt"
      ;;
  esac
}

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
  sed 's/.*(evmm_bench_//' | grep -vxE 'support|job|torch' | awk '!seen[$0]++')
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
# Neither windows nor send and receive use multicast, which not every machine that has it allows.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
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

# What belongs to an area beside its own program; adds to the array `results`.
measure_more() { # AREA ARGUMENTS...
  local area=$1 program=$evmm_root/build/release/bin/evmm_bench_torch
  shift
  # PyTorch's allocator, which reads its configuration when a process starts.
  if [ "$area" != allocator ] || ! [ -x "$program" ] || ! gpu_present; then return 0; fi
  local kind
  for kind in native expandable; do
    say "measuring $area: PyTorch, $kind"
    local set_to=expandable_segments:False
    if [ $kind = expandable ]; then set_to=expandable_segments:True; fi
    if env -u PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF=$set_to "$program" \
      --benchmark_color=false --benchmark_out="$out/${area}_torch_$kind.json" \
      --benchmark_out_format=json "$@" </dev/null | tee "$out/${area}_torch_$kind.txt"; then
      results+=("$out/${area}_torch_$kind.json")
    else
      warn "PyTorch's allocator ($kind) could not be measured; what it said is above"
      failures+=("$area (PyTorch, $kind)")
    fi
  done
}

for area in "${wanted[@]}"; do
  program=$evmm_root/build/release/bin/evmm_bench_$area
  if ! [ -x "$program" ]; then
    say "$area: not measured, since it needs CUDA and this build has none"
    continue
  fi
  json=$out/$area.json
  results=("$json")
  launch=()
  if [[ " ${on_ranks[*]} " == *" $area "* ]]; then
    launch=(mpirun -np "$ranks" --oversubscribe --bind-to none)
  fi
  say "measuring $area"
  if ! "${launch[@]}" "$program" \
    --benchmark_color=false --benchmark_out="$json" --benchmark_out_format=json "$@" </dev/null |
    tee "$out/$area.txt"; then
    warn "the benchmarks of $area failed; what they said is above"
    failures+=("$area")
    continue
  fi
  references_of "$area" | tee -a "$out/$area.txt"
  say "$area: table $out/$area.txt, numbers $json"
  measure_more "$area" "$@"
  if $plots; then
    while read -r -a drawn; do
      picture=$out/$area${drawn[0]#-}.svg
      status=0
      "$python" "$evmm_root/scripts/plot_bench.py" "${results[@]}" "$picture" "${drawn[@]:1}" ||
        status=$?
      case $status in
        0) say "$area: plot $picture" ;;
        3) say "$area: no plot $picture, since no case that was run belongs in it" ;;
        *)
          warn "no plot $picture: scripts/plot_bench.py failed"
          failures+=("$area (plot)")
          ;;
      esac
    done < <(plots_of "$area")
  fi
done
[ ${#failures[@]} -eq 0 ] || die "failed: ${failures[*]}"
