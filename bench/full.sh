#!/usr/bin/env bash
# Everything that says whether to disaggregate: mixed load and traces, goodput search, capacity. Takes hours; what is in
# FOLDER already is not measured again.
#   bench/full.sh FOLDER      env: CONVERSATION, CODE: full traces, in place of the samples that ship here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1
mkdir -p "$folder"
server=

pdserve() { .venv/bin/python -m pdserve.cli "$@"; }

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" || true
        server=
    fi
}
trap stop EXIT

# start NAME FLAGS…: a fleet on the default ports, ready to serve
start() {
    local name=$1
    shift
    .venv/bin/python -m pdserve.cli serve --set worker.prefix_cache=false "$@" >"$folder/$name.log" 2>&1 &
    server=$!
    until curl -sf http://127.0.0.1:8000/health >/dev/null; do
        kill -0 "$server" || { cat "$folder/$name.log" >&2; exit 1; }
        sleep 0.5
    done
}

pdserve bench compare --folder "$folder/mixed" --rates 0.5,1,1.5,2 --duration 60 --repeats 3
# Lengths and rates of the traces are scaled to two cores and a small model: about 60% of what these can do.
pdserve bench compare --folder "$folder/conversation" --trace "${CONVERSATION:-azure-conv-sample}" \
    --length-factor 0.25 --rates 0.1,0.2 --duration 120 --repeats 3
pdserve bench compare --folder "$folder/code" --trace "${CODE:-azure-code-sample}" \
    --length-factor 0.25 --rates 0.15,0.3 --duration 120 --repeats 3

for fleet in apart together; do
    flags=(--mode disaggregated)
    if [ "$fleet" = together ]; then
        flags=(--mode colocated --set worker.threads=2 --set colocated.token_budget=64)
    fi
    if [ ! -e "$folder/search-$fleet.json" ]; then
        start "search-$fleet" "${flags[@]}"
        pdserve bench serve --preset mixed --protocol grpc --search --duration 60 --json "$folder/search-$fleet.json" \
            --html "$folder/search-$fleet.html"
        stop
    fi
    if [ ! -e "$folder/capacity-$fleet.json" ]; then
        start "capacity-$fleet" "${flags[@]}"
        pdserve bench capacity --protocol grpc --cells "$folder/cells-$fleet.json" --json "$folder/capacity-$fleet.json" \
            --html "$folder/capacity-$fleet.html"
        stop
    fi
done
