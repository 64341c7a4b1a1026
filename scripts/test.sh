#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds evmm and runs its tests. See --help.

source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [options]

Installs what is missing with apt (as root or through sudo), builds a preset, and runs its tests.
The last line is `N passed, N failed`: GoogleTest cases one by one, other tests as one each. What
was skipped is listed before it with the reason. Works from any folder.

  --preset NAME   dev (default), release, asan, tsan or gpu; may be given several times
  --all           dev, then asan, then tsan
  --label NAME    only tests with this label: unit, mpi, gpu, bench, install; may be repeated
  --filter REGEX  only CTest entries whose name matches (see: ctest --test-dir build/dev -N)
  -j, --jobs N    parallel compilations, and cores that tests may use; default: all cores
  -h, --help      this text

The exit code is 0 when everything passed, 1 when something failed or could not be built, 2 for a
mistake on the command line. With EVMM_FAIL_ON_SKIP=1 a skipped test is a failure of the run.
Reports: build/PRESET/reports/ (JUnit of CTest, and one XML file for each GoogleTest process).
TEXT
}

presets=()
labels=()
filter=
jobs=$(default_jobs)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --preset)
      needs_value "$1" "$@"
      case $2 in
        dev | release | asan | tsan | gpu) presets+=("$2") ;;
        *) die_usage "unknown preset '$2'; there are dev, release, asan, tsan and gpu" ;;
      esac
      shift
      ;;
    --all) presets+=(dev asan tsan) ;;
    --label)
      needs_value "$1" "$@"
      labels+=("$2")
      shift
      ;;
    --filter)
      needs_value "$1" "$@"
      filter=$2
      shift
      ;;
    -j | --jobs)
      needs_value "$1" "$@"
      jobs=$2
      shift
      ;;
    -j[0-9]*) jobs=${1#-j} ;;
    *) die_usage "unknown argument '$1'" ;;
  esac
  shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die_usage "-j takes a number from 1 up, not '$jobs'"
[ ${#presets[@]} -gt 0 ] || presets=(dev)

passed=0
failed=0
skipped=0

# Prints the failed and the skipped tests of a preset, then `totals PASSED FAILED SKIPPED`.
count_reports() {
  find "$1" -mindepth 2 -name '*.xml' -print0 | sort -z |
    xargs -0 awk -v folder="$1/" -f "$evmm_root/scripts/count_tests.awk" "$1/ctest.xml"
}

# Builds and tests one preset, and adds to the totals.
run_preset() {
  local preset=$1 label status=0
  local tree=$evmm_root/build/$preset
  local reports=$tree/reports
  if ! build_preset "$preset" "$jobs"; then
    failed=$((failed + 1))
    return
  fi
  rm -rf "$reports"
  mkdir -p "$reports"
  local -a test=(ctest --test-dir "$tree" -j "$jobs" --output-on-failure --no-tests=error
    --output-junit "$reports/ctest.xml")
  if [ ${#labels[@]} -gt 0 ]; then
    label=$(IFS='|' && printf '%s' "${labels[*]}")
    test+=(-L "^($label)\$")
  fi
  [ -z "$filter" ] || test+=(-R "$filter")
  # The thread sanitizer of gcc 12 and 13 cannot start where the kernel randomises addresses with
  # 32 bits, as current kernels do.
  if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
    test=(setarch -R "${test[@]}")
  fi
  say "running the tests of build/$preset"
  "${test[@]}" || status=$?
  if [ ! -s "$reports/ctest.xml" ]; then
    warn "CTest wrote no report for the $preset preset (exit code $status)"
    failed=$((failed + 1))
    return
  fi
  local word rest
  local p=0 f=0 s=0
  while read -r word rest; do
    case $word in
      totals) read -r p f s <<<"$rest" ;;
      failed:) printf 'failed: [%s] %s\n' "$preset" "$rest" ;;
      skipped:) skip_lines+=("[$preset] $rest") ;;
    esac
  done < <(count_reports "$reports")
  # Whatever the reports say, CTest's verdict stands.
  if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
    warn "CTest failed with exit code $status on the $preset preset, though no test did"
    f=1
  fi
  say "$preset: $p passed, $f failed, $s skipped"
  passed=$((passed + p))
  failed=$((failed + f))
  skipped=$((skipped + s))
}

# For tests on several hosts, which are namespaces of this machine. Where systemd runs, installing
# the server would start it for everybody; those tests then say what is missing.
evmm_packages+='
iproute2             program ip
openssh-client       program ssh
'
if [ ! -d /run/systemd/system ]; then
  evmm_packages+='
openssh-server       program sshd
'
fi
ensure_packages
mpi_environment
skip_lines=()
for preset in "${presets[@]}"; do
  run_preset "$preset"
done

if [ "$skipped" -gt 0 ]; then
  printf '%d skipped:\n' "$skipped"
  printf '  %s\n' "${skip_lines[@]}"
fi
code=0
[ "$failed" -eq 0 ] || code=1
if [ "${EVMM_FAIL_ON_SKIP:-0}" = 1 ] && [ "$skipped" -gt 0 ]; then
  warn "EVMM_FAIL_ON_SKIP=1 and $skipped skipped"
  code=1
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
exit "$code"
