#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds evmm and runs the main example. See --help.

source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/demo.sh [options] [-- arguments of build/release/bin/01_moe_exchange]

Installs what is missing with apt (as root or through sudo), builds the release preset, and runs
the main example: an exchange of tokens between the experts of several ranks, through a receive
buffer larger than one device's memory. Every byte is checked; the last line is `verified: ...`.
Works from any folder. Without a GPU the host driver plays one small device a rank.

  --ranks N       processes of the job; default 4
  --routing FILE  a routing of tokens to experts (ids and weights a line, .csv or .csv.gz); default:
                  a recorded one of ../shared/routing when it is there, else a generated, skewed one
  --picture FILE  where the picture of what happened goes; default build/release/demo/picture.svg
  -j, --jobs N    parallel compilations; default: all cores
  -h, --help      this text

The example's output is kept in build/release/demo/log, its numbers in numbers.json beside it.
The exit code is 0 when every byte was right, 1 when something failed, 2 for a mistake on the
command line.
TEXT
}

ranks=4
routing=
picture=
jobs=$(default_jobs)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --ranks)
      needs_value "$1" "$@"
      ranks=$2
      shift
      ;;
    --routing)
      needs_value "$1" "$@"
      routing=$(realpath -m -- "$2")
      [ -r "$routing" ] || die_usage "cannot read the routing '$2'"
      shift
      ;;
    --picture)
      needs_value "$1" "$@"
      picture=$(realpath -m -- "$2")
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
    *) die_usage "unknown argument '$1'; arguments of the example follow --" ;;
  esac
  shift
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die_usage "--ranks takes a number from 1 up, not '$ranks'"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die_usage "-j takes a number from 1 up, not '$jobs'"

ensure_packages
have mpirun || die "no mpirun, though its package is there; look at PATH ($PATH)"
build_preset release "$jobs" 01_moe_exchange || exit 1
mpi_environment

demo=$evmm_root/build/release/demo
log=$demo/log
mkdir -p "$demo"
picture=${picture:-$demo/picture.svg}
# Whether one of these options of the example was given by hand: given 'OPTION...' ARGUMENTS...
given() {
  local option
  for option in $1; do
    [[ " ${*:2} " != *" $option "* && " ${*:2} " != *" $option="* ]] || return 0
  done
  return 1
}
generate='--skew --top-k --experts' # what is told of a routing that there is not yet
if [ -z "$routing" ] && ! given "--routing $generate" "$@"; then
  for file in "$evmm_root"/../shared/routing/*_a_*.csv.gz; do
    [ ! -r "$file" ] || routing=$(realpath -- "$file")
  done
fi
arguments=()
given --picture "$@" || arguments+=(--picture "$picture")
given --json "$@" || arguments+=(--json "$demo/numbers.json")
# A worst case of about 64 MiB a rank, twice the device below.
given --tokens "$@" || arguments+=(--tokens $((ranks > 4 ? (4095 + ranks) / ranks : 1024)))
if [ -n "$routing" ]; then
  arguments+=(--routing "$routing")
  say "routing: $routing"
elif ! given --routing "$@"; then
  given --skew "$@" || arguments+=(--skew 1.2)
  say "routing: generated, skewed"
fi

if [ "${EVMM_DRIVER:-}" != host ] && gpu_present; then
  say "running on $(nvidia-smi -L | grep -c '^GPU ') GPU(s)"
  if ! given --device-cap "$@"; then
    # A real device is too large to outgrow in a demonstration.
    arguments+=(--device-cap 32M)
    say "each rank keeps to 32M of its device, as if it had no more; --device-cap changes that"
  fi
else
  export EVMM_DRIVER=host
  export EVMM_HOST_DEVICES=${EVMM_HOST_DEVICES:-$ranks}
  export EVMM_HOST_DEVICE_BYTES=${EVMM_HOST_DEVICE_BYTES:-32M}
  say "no GPU: the host driver plays $EVMM_HOST_DEVICES devices of $EVMM_HOST_DEVICE_BYTES"
fi

say "running 01_moe_exchange on $ranks ranks"
status=0
mpirun -np "$ranks" --oversubscribe --bind-to none \
  "$evmm_root/build/release/bin/01_moe_exchange" "${arguments[@]}" "$@" </dev/null 2>&1 |
  tee "$log" || status=$?
last=$(grep '^verified: ' "$log" | tail -n 1 || true)
if [ "$status" -ne 0 ]; then
  die "the example failed with exit code $status; its output is above and in $log"
fi
if given '-h --help' "$@"; then exit 0; fi
[ -n "$last" ] || die "the example ended without its line 'verified: ...'; its output is in $log"
# The example says it last; should the launcher have spoken after it, it is said again.
[ "$(tail -n 1 "$log")" = "$last" ] || printf '%s\n' "$last"
