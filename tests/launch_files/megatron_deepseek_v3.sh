#!/bin/bash
#SBATCH -N 128
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=h100:8
# DeepSeek-V3: latent attention, experts, one layer of multi-token prediction, fp8.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_IB_TIMEOUT=22
TP=2; PP=16; EP=64
LAYERS=61
srun --container-image=nvcr.io/nemo bash -c "python -u pretrain_gpt.py \
  --num-layers ${LAYERS} --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 \
  --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --kv-channels 128 \
  --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048 \
  --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 \
  --moe-router-group-topk 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep \
  --moe-router-score-function sigmoid --moe-router-force-load-balancing --moe-grouped-gemm \
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 \
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 --tokenizer-type NullTokenizer \
  --make-vocab-size-divisible-by 64 --untie-embeddings-and-output-weights --disable-bias-linear \
  --swiglu --normalization RMSNorm --position-embedding-type rope --mock-data \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
  --expert-model-parallel-size $EP --expert-tensor-parallel-size 1 \
  --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L' \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe_act \
  --bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather \
  --use-precision-aware-optimizer --main-grads-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 \
  --cuda-graph-impl transformer_engine --cuda-graph-modules attn \
  --micro-batch-size 1 --global-batch-size 8192 --train-samples 585937500 --no-such-flag 3"
