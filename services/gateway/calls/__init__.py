"""sluice.v1 over gRPC: authentication, one coroutine per call, and conversion of events to messages of the contract."""
