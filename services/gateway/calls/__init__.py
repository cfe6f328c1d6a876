"""The RPCs: one coroutine per call, and the state of a stream that carries many generations."""
