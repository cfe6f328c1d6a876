"""The Open Inference Protocol as Triton serves it, `inference.GRPCInferenceService`, on top of the generation
service."""
