#!/bin/sh
# Runs SMG in the network namespace of the gateway's container, and ends it with that namespace: a gateway that restarts
# gets a new one, and this container must be started again (its restart policy does that) to be in it.
set -eu
interfaces=${INTERFACES:-/proc/net/dev}
trap 'kill "${smg:-$!}"' TERM INT # before SMG runs: a signal in its first moment reaches it too

# 0.0.0.0 is that of the container; compose publishes it on the host's loopback. Metrics stay inside.
smg launch --host 0.0.0.0 --port 30000 --prometheus-host 127.0.0.1 --worker-urls grpc://127.0.0.1:50052 \
  --tenant-api-key "${SMG_TENANT_KEY:?set it to TENANT:KEY}" \
  --control-plane-api-keys "${SMG_CONTROL_KEY:?set it to ID:NAME:admin:KEY}" &
smg=$!
while kill -0 $smg 2>/dev/null; do
  if ! grep -qv -e '|' -e 'lo:' "$interfaces"; then # no interface but loopback is left
    echo "smg: the gateway's container has restarted: ending, to be started again in its network" >&2
    sleep "${PAUSE:-5}" # it runs again by then: Docker joins the namespace of a running container only
    kill $smg
    wait $smg || true
    exit 1
  fi
  sleep "${EVERY:-2}" &
  wait $! || true
done
wait $smg
