from megatron.bridge.recipes.llama.h100 import llama3_70b_pretrain_32gpu_h100_bf16_config as recipe
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

cfg = recipe()
cfg.model.tensor_model_parallel_size = 4
cfg.model.pipeline_model_parallel_size = 4
cfg.model.virtual_pipeline_model_parallel_size = 5
cfg.model.context_parallel_size = 2
cfg.model.sequence_parallel = True
cfg.model.seq_length = 8192
cfg.model.recompute_granularity = None
cfg.train.micro_batch_size = 1
cfg.train.global_batch_size = 128
cfg.train.train_iters = 1000
cfg.ddp.overlap_grad_reduce = True
cfg.ddp.grad_reduce_in_fp32 = False
cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
cfg.optimizer.lr = 3e-4

if __name__ == "__main__":
    pretrain(cfg, forward_step)
