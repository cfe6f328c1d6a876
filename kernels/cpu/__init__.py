"""Our own CPU kernels (C++): which builds there are, and the functions of tensors that call them."""
