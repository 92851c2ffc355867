"""Triton kernels and their launchers for CUDA and ROCm tensors; imported at the first call that needs them."""
