#!/usr/bin/env bash
# Talk to Catenary with curl: examples/curl.sh [BASE_URL] [MODEL]
set -euo pipefail
base=${1:-http://127.0.0.1:8000/v1}
model=${2:-SmolLM2-135M-Instruct}

post() { # post PATH JSON : one request; the answer on one line
  curl --fail-with-body -sS "$base/$1" -H 'Content-Type: application/json' \
    ${OPENAI_API_KEY:+-H "Authorization: Bearer $OPENAI_API_KEY"} -d "$2"
  echo
}

echo "# a chat"
post chat/completions '{"model": "'"$model"'", "temperature": 0, "max_tokens": 64,
  "messages": [{"role": "user", "content": "Name the capital of France."}]}'

echo "# as a stream"
post chat/completions '{"model": "'"$model"'", "temperature": 0, "max_tokens": 16, "stream": true,
  "messages": [{"role": "user", "content": "Name the capital of France."}]}'

echo "# JSON by a schema"
post chat/completions '{"model": "'"$model"'", "temperature": 0, "max_tokens": 64,
  "messages": [{"role": "user", "content": "Give me a city and whether it is a capital, as JSON."}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": true, "schema": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "capital": {"type": "boolean"}},
    "required": ["name", "capital"], "additionalProperties": false}}}}'

echo "# a text, with log probabilities"
post completions '{"model": "'"$model"'", "prompt": "The capital of France is", "temperature": 0,
  "max_tokens": 4, "logprobs": 2}'

echo "# the Responses API"
post responses '{"model": "'"$model"'", "input": "Name the capital of France.", "temperature": 0,
  "max_output_tokens": 64, "store": false}'
