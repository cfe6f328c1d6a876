"""The RPCs: who may call them, one coroutine per call, and the state of a stream that carries many generations."""
