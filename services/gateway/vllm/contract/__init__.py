"""Generated stubs of the contract `vllm.grpc.engine`. Written by tools/generate_stubs.py, never by hand."""
