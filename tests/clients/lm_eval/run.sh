#!/bin/sh
# Serves SmolLM2-135M in fp32 and runs the three tasks with lm-eval: run.sh LM_EVAL_VENV OUTPUT_DIR, in the repository root.
set -eu
lm_eval=$1/bin/lm_eval
output=$2
model=${PDSERVE_CACHE_DIR:-$HOME/.cache/pdserve}/models/smollm2-135m-instruct/model.gguf
port=${PORT:-8123}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OPENAI_API_KEY=none

.venv/bin/python -m tests.clients.lm_eval.tokenizer_dir "$model" "$output/tokenizer"
.venv/bin/python -m pdserve.cli serve --dtype float32 --http-port "$port" --grpc-port 0 &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do kill -0 "$server"; sleep 0.5; done

common="model=smollm2-135m-instruct,num_concurrent=4,max_retries=1,max_length=8192"
"$lm_eval" run --include_path tests/clients/lm_eval --tasks pdserve_facts,pdserve_prose,pdserve_series \
	--model local-completions --batch_size 1 --log_samples --output_path "$output/completions" \
	--model_args "$common,base_url=http://127.0.0.1:$port/v1/completions,tokenizer_backend=huggingface,tokenizer=$output/tokenizer"
"$lm_eval" run --include_path tests/clients/lm_eval --tasks pdserve_series --apply_chat_template \
	--model local-chat-completions --batch_size 1 --log_samples --output_path "$output/chat" \
	--model_args "$common,base_url=http://127.0.0.1:$port/v1/chat/completions"
