"""Which GPU a launcher launches on."""

import functools

import torch


def on_device(launcher):
    """Runs a launcher with its first argument's GPU as the current one: Triton launches there, wherever the tensors are."""

    @functools.wraps(launcher)
    def launch(tensor, *args, **kwargs):
        if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
            return launcher(tensor, *args, **kwargs)
        with torch.cuda.device(tensor.device):
            return launcher(tensor, *args, **kwargs)

    return launch
