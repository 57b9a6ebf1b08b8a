FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 NPROC_PER_NODE=8 MASTER_ADDR=192.168.0.1 llamafactory-cli train llama_factory_lora.yaml
