#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program under mpirun on several hosts, which are namespaces of this machine: each has its
# own network, processes, host name and /dev/shm (64 MiB, as containers have), its own address on a
# bridge, and its own sshd, through which mpirun starts the ranks there.
#
#   many_hosts.sh HOSTS RANKS_A_HOST MPIRUN [option of mpirun...] PROGRAM
#
# Nothing is made outside of the namespaces, not even a file, and the kernel ends their processes
# with this script, however that ends. The machine's own sshd, its settings and its network are not
# touched. Without the rights or the programs it prints `skipped: reason` and returns 77.
set -euo pipefail

hosts=$1
ranks=$2
mpirun=$3
network=10.77.0  # on no interface of the machine's own namespace, where it could collide
port=2222
folder=/mnt  # a tmpfs of this script's own

skip() {
  printf 'skipped: %s\n' "$*"
  exit 77
}
die() {
  printf 'many_hosts.sh: %s\n' "$*" >&2
  exit 1
}

PATH=$PATH:/usr/sbin:/sbin
a_host=(unshare --net --mount --pid --uts --ipc --fork --kill-child --propagation private)
if [ "${EVMM_MANY_HOSTS:-}" != inside ]; then
  [ "$(id -u)" -eq 0 ] || skip "hosts as namespaces take root"
  for program in ip sshd ssh ssh-keygen unshare nsenter setpriv; do
    command -v "$program" >/dev/null ||
      skip "$program is missing (Debian: openssh-server, openssh-client, iproute2, util-linux)"
  done
  why=$("${a_host[@]}" mount -t tmpfs tmpfs "$folder" 2>&1) ||
    skip "no namespaces may be made here: $why"
  why=$(unshare --net ip link add evmm type bridge 2>&1) || skip "no bridge may be made here: $why"
  why=$(unshare --net ip link add evmm0 type veth peer name evmm1 2>&1) ||
    skip "no veth pair may be made here: $why"
  EVMM_MANY_HOSTS=inside exec unshare --mount --propagation private "$BASH" "$0" "$@"
fi
unset EVMM_MANY_HOSTS
shift 3

mount -t tmpfs tmpfs "$folder"
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
cat >"$folder/ssh_config" <<TEXT
Host *
  Port $port
  User root
  IdentityFile $folder/key
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
TEXT

# What runs as a host's first process: it says who it is, waits for its address, and serves ssh.
cat >"$folder/boot" <<'TEXT'
set -euo pipefail
index=$1 folder=$2 address=$3
read -r self _ </proc/self/stat  # as the machine numbers processes: /proc is still its own
printf '%s\n' "$self" >"$folder/up$index"
hostname "evmm-host$index"
mount -t proc proc /proc
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
read -r _ <"$folder/go$index"
exec "$(command -v sshd)" -D -e -f /dev/null -h "$folder/host_key" -o "ListenAddress=$address" \
  -o "AuthorizedKeysFile=$folder/key.pub" -o AllowUsers=root -o PermitRootLogin=prohibit-password \
  -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o UsePAM=no \
  -o StrictModes=no -o PidFile=none -o MaxStartups=100
TEXT

pids=()
gos=()
logs=()
list=
for ((i = 0; i < hosts; ++i)); do
  mkfifo "$folder/up$i" "$folder/go$i" "$folder/log$i"
  exec {up}<>"$folder/up$i" {go}<>"$folder/go$i" {log}<>"$folder/log$i"  # so that no open waits
  gos+=("$go")
  logs+=("$log")
  setpriv --pdeathsig SIGKILL "${a_host[@]}" "$BASH" "$folder/boot" "$i" "$folder" \
    "$network.$((i + 1)):$port" </dev/null >"$folder/log$i" 2>&1 &
  read -r -t 20 -u "$up" pid || die "host $i did not come up"
  pids+=("$pid")
  list+=${list:+,}$network.$((i + 1)):$ranks
done

# Host 0 is the switch as well.
on_net() { nsenter --target "${pids[$1]}" --net "${@:2}"; }
on_net 0 ip link add card type bridge
for ((i = 0; i < hosts; ++i)); do
  if [ "$i" -gt 0 ]; then
    on_net 0 ip link add "port$i" type veth peer name card netns "${pids[i]}"
    on_net 0 ip link set "port$i" master card up
  fi
  on_net "$i" ip link set lo up
  on_net "$i" ip addr add "$network.$((i + 1))/24" dev card
  on_net "$i" ip link set card up
  printf 'go\n' >&"${gos[i]}"
done
for ((i = 0; i < hosts; ++i)); do
  line=
  until [[ $line = *"Server listening"* ]]; do
    read -r -t 20 -u "${logs[i]}" line || die "host $i: no sshd within 20 s; it said: $line"
  done
  cat <&"${logs[i]}" >"$folder/sshd$i" &  # a full pipe would hold sshd up
done

options=(--host "$list" -np $((hosts * ranks))
  --mca plm_rsh_agent "ssh -F $folder/ssh_config" --mca plm_rsh_no_tree_spawn 1
  --mca btl "tcp,vader,self" --mca btl_tcp_if_include "$network.0/24"
  --mca oob_tcp_if_include "$network.0/24" --mca orte_tmpdir_base "$folder")
export EVMM_TEST_NODES=$hosts
for variable in $(compgen -e); do
  case $variable in
    EVMM_* | GTEST_* | ASAN_OPTIONS | TSAN_OPTIONS) options+=(-x "$variable") ;;
  esac
done
code=0
nsenter --target "${pids[0]}" --net --mount --pid --uts --ipc --wd="$PWD" \
  "$mpirun" "${options[@]}" "$@" || code=$?
if [ "$code" -ne 0 ]; then
  for ((i = 0; i < hosts; ++i)); do sed "s/^/sshd of host $i: /" "$folder/sshd$i" >&2; done
fi
for ((i = 0; i < hosts; ++i)); do kill -KILL "${pids[i]}"; done
mapfile -t started < <(jobs -p)
kill "${started[@]}" 2>/dev/null || true
wait
exit "$code"
