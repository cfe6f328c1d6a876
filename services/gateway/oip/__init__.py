"""Triton's form of the Open Inference Protocol, `inference.GRPCInferenceService`, on top of the generation service."""
