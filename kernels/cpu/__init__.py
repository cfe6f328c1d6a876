"""CPU kernels in C++: which builds there are, and the functions of tensors that call them."""
