"""Models of others in, ours out: Hugging Face folders, checkpoints of Megatron-LM, CPM and DeepSpeed."""
