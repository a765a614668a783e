#!/bin/sh
# Starts a command on a host of the emulated cluster, as ssh would: enter_host.sh [options] ADDRESS COMMAND...
# MPI's launchers take it as their launch agent. EMULATED_HOSTS is "address=pid ...", from emulate_cluster.py.
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
for host in $EMULATED_HOSTS; do
  if [ "${host%%=*}" = "$address" ]; then
    exec nsenter -t "${host##*=}" -n -u -i -m --wd="$PWD" sh -c "$*"
  fi
done
echo "enter_host.sh: there is no host $address; hosts: $EMULATED_HOSTS" >&2
exit 1
