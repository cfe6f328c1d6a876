"""What computes attention over the paged cache on a GPU: our own kernels, or a library that is installed.

`interface` says what a library has to state and to do; `fa3` and `flashinfer` adapt one each. `measured` compares one
with our kernels, and `chosen` has each step computed by what was chosen for its kind. Independent of models and
requests.
"""
