"""Every optimizer as data, and the one list of them: kernels are in `megatrain.optim`."""
