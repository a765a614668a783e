#!/bin/sh
# Starts a command on a host of the emulated cluster, as ssh would: enter_host.sh [options] ADDRESS COMMAND...
# MPI's launchers take it as their launch agent. EMULATED_HOSTS is "address=pid ...", from emulate_cluster.py.
# The command sees /tmp, but what it writes there stays on its host: launchers that are killed leave files behind.
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
for host in $EMULATED_HOSTS; do
  if [ "${host%%=*}" = "$address" ]; then
    cores=$(taskset -cp "${host##*=}")  # "pid 123's current affinity list: 0,1"
    # shellcheck disable=SC2016 # the inner shell expands
    exec taskset -c "${cores##*: }" nsenter -t "${host##*=}" -n -u -i -m unshare -m sh -c '
      scratch=/dev/shm/tmp.$$
      mkdir -p "$scratch/upper" "$scratch/work"
      mount -t overlay overlay -o "lowerdir=/tmp,upperdir=$scratch/upper,workdir=$scratch/work" /tmp
      cd "$2" && exec sh -c "$1"' sh "$*" "$PWD"
  fi
done
echo "enter_host.sh: there is no host $address; hosts: $EMULATED_HOSTS" >&2
exit 1
