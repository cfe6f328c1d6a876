"""Decides and computes: requests in, sampled tokens out. Knows no socket, no protobuf, no text, no span."""
