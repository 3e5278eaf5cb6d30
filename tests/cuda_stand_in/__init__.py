"""A stand-in for CUDA on machines without GPUs: `python -m tests.cuda_stand_in` trains tiny models on it.

The device type CUDA is registered in the CPU build of torch, with the memory of the CPU (device.cpp, operations.cpp).
So tensors on `cuda` have real numbers, and tensors on different devices cannot be combined. Each operation for which a
host would wait for its device is counted. Collectives are checked by NCCL's rules, while gloo carries the data.
"""
