"""The engine process of the ring: translates between the ring's messages and the engine."""
