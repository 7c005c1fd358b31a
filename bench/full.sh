#!/usr/bin/env bash
# Everything that says whether to disaggregate: mixed load and traces, goodput search, capacity. Takes an hour or two;
# what is in FOLDER already is not measured again.
#   bench/full.sh FOLDER
# Environment: CONVERSATION, CODE: full traces, in place of the samples that ship here. REPEATS of every comparison (2);
# with more than before, those that are missing are added. SEARCH_REPEATS: at each rate of a search (3), an odd number.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1
mkdir -p "$folder"
python=.venv/bin/python
http_port=18000 grpc_port=18001
server=

pdserve() { "$python" -m pdserve.cli "$@"; }

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" || true
        server=
    fi
}
trap stop EXIT

# start NAME FLAGS…: a fleet of ours, ready to serve
start() {
    local name=$1
    shift
    "$python" -m pdserve.cli serve --http-port "$http_port" --grpc-port "$grpc_port" --set worker.prefix_cache=false \
        "$@" >"$folder/$name.log" 2>&1 &
    server=$!
    until kill -0 "$server" 2>/dev/null && curl -sf "http://127.0.0.1:$http_port/health" >/dev/null; do
        kill -0 "$server" 2>/dev/null || { cat "$folder/$name.log" >&2; exit 1; }
        sleep 0.5
    done
}

# finding NAME COMMAND…: writes NAME.json once it has ended by itself. Exit code 1, nothing found, is a finding too.
finding() {
    local name=$1 code=0
    shift
    pdserve "$@" --base-url "http://127.0.0.1:$http_port" --address "127.0.0.1:$grpc_port" --protocol grpc \
        --json "$folder/$name.part" --html "$folder/$name.html" || code=$?
    [ "$code" -le 1 ] || exit "$code"
    mv "$folder/$name.part" "$folder/$name.json"
}

compare() {
    local name=$1
    shift
    pdserve bench compare --folder "$folder/$name" --repeats "${REPEATS:-2}" "$@"
}

compare mixed --rates 0.5,1.25,2 --duration 45
# The traces' lengths and rates are scaled to two cores and a small model.
on_traces=(--length-factor 0.25 --duration 60 --pilot-duration 30 --chunks 32,128 --prefill-chunks 512)
compare conversation --trace "${CONVERSATION:-azure-conv-sample}" --rates 0.2,0.5 "${on_traces[@]}"
compare code --trace "${CODE:-azure-code-sample}" --rates 0.4,0.8 "${on_traces[@]}"

# The fleets that the mixed load chose; each with as many KV blocks in all.
chosen() {
    "$python" - "$folder/mixed/report/result.json" "$1" <<'PYTHON'
import json, os, sys
fleets = json.load(open(sys.argv[1]))["conditions"]["settings"]["fleets"]
words = next(fleet["command"].split() for name, fleet in fleets.items() if name.startswith(sys.argv[2]))
words = words[words.index("serve") + 1 :]
print(*(os.path.expanduser(word) for at, word in enumerate(words) if not any(w in ("--http-port", "--grpc-port") for w in words[max(0, at - 1) : at + 1])))
PYTHON
}

for fleet in disaggregated colocated; do
    read -r -a flags <<<"$(chosen "$fleet")"
    if [ ! -e "$folder/search-$fleet.json" ]; then
        start "search-$fleet" "${flags[@]}"
        finding "search-$fleet" bench serve --preset mixed --search --duration 40 --repeats "${SEARCH_REPEATS:-3}"
        stop
    fi
    if [ ! -e "$folder/capacity-$fleet.json" ]; then
        start "capacity-$fleet" "${flags[@]}"
        finding "capacity-$fleet" bench capacity --rates 0.5,1,2 --documents 0,1 --duration 25 \
            --cells "$folder/cells-$fleet.json"
        stop
    fi
done
