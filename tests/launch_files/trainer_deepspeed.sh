#!/usr/bin/env bash
set -euo pipefail
SCRIPT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
deepspeed --num_nodes 2 --num_gpus 8 --master_port 29501 train.py \
    --deepspeed "$SCRIPT_DIR/ds_auto.json" \
    --model_name_or_path "$MODEL" \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \
    --max_seq_length 4096 --bf16 True --gradient_checkpointing True \
    --learning_rate 1e-5 --num_train_epochs 3 --save_strategy no \
    --attn_implementation flash_attention_2 --output_dir out --report_to none
