#!/usr/bin/env bash
# Two "nodes" on one Linux machine: two network namespaces, joined by a link of limited speed.
#
#   perf/two_nodes.sh 50mbit 2 bench.py compare ddp fsdp hsdp     the link's speed, ranks per node, a command
#   perf/two_nodes.sh none 2 train.py --dp hsdp                   a link without limit
#
# On both nodes it runs `torchrun --nnodes 2 --nproc-per-node 2` with the command. Shown are node 0's
# output and the bytes that crossed the link; the output of node 1 only if it fails. It needs `ip` and
# `tc` (package iproute2), and root or the right to make user namespaces.
set -euo pipefail

if [ $# -lt 3 ]; then
  echo "usage: perf/two_nodes.sh SPEED RANKS_PER_NODE SCRIPT [FLAG ...]    SPEED as 50mbit, or none" >&2
  exit 2
fi

# Start again in namespaces of our own, which vanish with the last process in them.
if [ -z "${IN_NAMESPACE-}" ]; then
  user=(); [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
  IN_NAMESPACE=1 exec unshare "${user[@]}" --mount --net --pid --fork --kill-child --mount-proc "$0" "$@"
fi
mount -t tmpfs none /run
printf '127.0.0.1 localhost\n127.0.1.1 %s\n10.0.0.1 node0\n10.0.0.2 node1\n' "$(hostname)" >/run/hosts
mount --bind /run/hosts /etc/hosts # as on Debian, the host's own name leads to no other node

speed=$1 ranks=$2
shift 2
for node in 0 1; do ip netns add $node; done
ip link add veth netns 0 type veth peer name veth netns 1
for node in 0 1; do
  ip -n $node link set lo up
  ip -n $node link set veth up
  ip -n $node address add 10.0.0.$((node + 1))/24 dev veth
  # The bucket must outlast the moments in which both cores compute and nobody fills it.
  [ "$speed" = none ] ||
    tc -n $node qdisc add dev veth root tbf rate "$speed" burst 1mbit latency 50ms
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
node() {
  ip netns exec "$1" torchrun --nnodes 2 --node-rank "$1" --nproc-per-node "$ranks" \
    --master-addr 10.0.0.1 --master-port 29500 "${@:2}"
}
output=/run/node1
node 1 "$@" >$output 2>&1 &
code=0
node 0 "$@" || code=$?
if ! wait $!; then
  [ $code != 0 ] || code=1
  { echo "node 1:"; tail -n 30 $output; } >&2
fi
sent=$(ip netns exec 0 cat /sys/class/net/veth/statistics/tx_bytes)
echo "node 0 sent $((sent / 1000000)) MB across the link"
exit $code
