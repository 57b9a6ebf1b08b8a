"""Records the operators of a step on the meta device, as a CUDA device would run them."""
