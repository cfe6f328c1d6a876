"""The engine: schedules and computes. Requests in, sampled tokens out; no sockets, protobuf, text or tracing spans."""
