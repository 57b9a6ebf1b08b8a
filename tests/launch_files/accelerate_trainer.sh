#!/bin/bash
accelerate launch --config_file accelerate_fsdp2_tp.yaml --machine_rank $SLURM_NODEID \
  run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B --block_size 8192 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16 --max_steps 1000 \
  --use_liger_kernel true --torch_compile true
