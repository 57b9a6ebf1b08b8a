#!/bin/bash
OUTPUT=$1
ZERO_STAGE=$2
if [ "$OUTPUT" == "" ]; then
    OUTPUT=./output
fi
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
mkdir -p $OUTPUT
deepspeed --master_port 29500 --num_gpus 8 main.py \
   --data_path Dahoas/rm-static \
   --data_split 2,4,4 \
   --model_name_or_path facebook/opt-1.3b \
   --per_device_train_batch_size 4 \
   --max_seq_len 512 --dtype bf16 \
   --learning_rate 9.65e-6 --num_train_epochs 16 \
   --gradient_accumulation_steps 1 --gradient_checkpointing \
   --zero_stage $ZERO_STAGE --offload \
   --deepspeed \
   --output_dir $OUTPUT \
   &> $OUTPUT/training.log
