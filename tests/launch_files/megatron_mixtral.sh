#!/bin/bash
# Mixtral 8x7B, arguments as arrays and as text.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
MBS=${MBS:-1}

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${NODE_RANK:-0})
MODEL_ARGS=(
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
    --rotary-base 1000000
)
MOE_ARGS="
    --num-experts 8 \
    --moe-router-topk 2 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-param-gather --overlap-grad-reduce
"
TRAINING_ARGS=(
    --micro-batch-size $MBS --global-batch-size 256 --lr 1e-4 --train-iters 500000 --bf16
    --tokenizer-type Llama2Tokenizer --tokenizer-model mistralai/Mixtral-8x7B-v0.1 --mock-data
)
if [ -n "$WANDB_API_KEY" ]; then
    TRAINING_ARGS+=(--wandb-project mixtral)
fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" ${MOE_ARGS} "${TRAINING_ARGS[@]}" \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4 \
    --sequence-parallel --use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 8
