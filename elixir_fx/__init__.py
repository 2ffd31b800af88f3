"""Train models far larger than their device memory: a compiler over torch.fx graphs."""
