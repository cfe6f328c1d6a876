"""The front door: gRPC on one side, the ring on the other."""
