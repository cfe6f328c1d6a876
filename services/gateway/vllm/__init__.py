"""The protocol of the Shepherd Model Gateway's vLLM workers, `vllm.grpc.engine`, on top of the generation service."""
