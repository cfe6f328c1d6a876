"""Reference implementations in torch operators. They run on any device, and tests compare the kernels with them."""
