"""The Open Inference Protocol as Triton speaks it, laid over our own contract: `inference.GRPCInferenceService`."""
