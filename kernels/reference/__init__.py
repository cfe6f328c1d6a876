"""Reference implementations in torch operators: they run anywhere, and kernels are compared with them."""
