#!/usr/bin/env bash
# Baton with curl: models, a completion, a streamed chat, its explanation and the metrics.
#
#   cargo run --release -- up             # in another terminal
#   examples/curl.sh
#
# BATON_URL, BATON_ADMIN and BATON_MODEL select another router, its admin listener and another model.
set -euo pipefail

url=${BATON_URL:-http://127.0.0.1:8000}
admin=${BATON_ADMIN:-http://127.0.0.1:8081}
model=${BATON_MODEL:-baton-demo}
# The built-in model recalls facts from its prompt.
facts='Alice lives in Paris. Bob has a dog named Rex. The red box holds a key.'

# Sends JSON to a path of the router. Options of curl may follow. An error status ends this script.
post() {
    local path=$1 body=$2
    shift 2
    curl -sS --fail-with-body -H 'content-type: application/json' "$@" -d "$body" "$url$path"
}

echo "== models"
curl -sS --fail-with-body "$url/v1/models"
echo

echo "== completion"
post /v1/completions "{\"model\":\"$model\",\"prompt\":\"$facts Alice lives in\",\"max_tokens\":8,\"temperature\":0}"
echo

echo "== chat, streamed"
# `x-request-id` names the request in logs, traces and `/explain`.
post /v1/chat/completions "{\"model\":\"$model\",\"messages\":[{\"role\":\"user\",
    \"content\":\"$facts What does the red box hold?\"}],\"temperature\":0,\"stream\":true}" \
    -N -H 'x-request-id: example-chat'

echo "== why the router chose these engines"
curl -sS --fail-with-body "$admin/explain/example-chat?pretty"
echo

echo "== metrics: requests by outcome"
curl -sS --fail-with-body "$admin/metrics" | grep '^baton_router_requests_total'
