"""CPU kernels in vectorized torch. One file a stem; each function has its op's name and arguments."""
