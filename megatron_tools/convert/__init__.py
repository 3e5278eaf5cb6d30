"""Conversion to and from Hugging Face folders, and from checkpoints of Megatron-LM, CPM and DeepSpeed."""
