"""The engine in the ring: the only room that knows both messages and the engine."""
