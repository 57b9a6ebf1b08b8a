#!/bin/bash
# Overrides on the command line go over the file.
PYTORCH_ALLOC_CONF="expandable_segments:True" torchrun --nproc_per_node=8 --nnodes=8 \
  --rdzv_backend c10d -m torchtitan.train --job.config_file ./torchtitan_llama3_8b.toml \
  --parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree 2 \
  --parallelism.pipeline_parallel_schedule Interleaved1F1B \
  --parallelism.pipeline_parallel_layers_per_stage 3 --parallelism.enable_async_tensor_parallel \
  --training.local_batch_size 8 --training.global_batch_size 256 --activation_checkpoint.mode full
