#!/bin/bash
./scripts/training/train.sh --nodes 2 --gpus-per-node 8 --account A --partition P \
  --recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config --mode pretrain --dataset mock \
  model.expert_model_parallel_size=8 model.moe_token_dispatcher_type=alltoall model.seq_length=4096 \
  train.global_batch_size=512 train.micro_batch_size=2 train.train_iters=100
