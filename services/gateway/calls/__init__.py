"""sluice.v1 over gRPC: who may call, one coroutine per call, and what comes as messages of the contract."""
