"""The gateway: serves generations to clients over gRPC on one side and talks to the ring on the other.

The path of a request: an adapter (`calls` for sluice.v1 over gRPC, `oip` for Open Inference, `vllm` for SMG) reads a
`CallMetadata` and calls the `GenerationService`. The service has the request translated (`contract`), admitted and sent
by the `RequestManager`. It returns a `GenerationStream` (one reader of one `OpenRequest`) or a `ConverseSession` (many,
by tag). `DetachedSessions` keeps requests that outlive their reader; `PeerGateways` reaches those of other gateways.

The path of a token: ring → `Gateway.handle` → `RequestManager.handle` → `OpenRequest.handle` → its `Delivery`, which
wakes the stream's `EventWriter` → `EventSequence.next` returns it as an event → the adapter writes that.

An `OpenRequest` has parts: `Delivery` (what waits for its reader), `Replay` (how it is sent again), `GrantedCredit`,
`Accounting`. Messages of the ring are handled, events are written, readers attach and detach.

Packages: `access` identity, quotas and limits; `calls`, `oip` and `vllm` adapters; `connections` sockets and their
limits; `contract` translation of requests, answers and errors; `generation` the service; `requests` the open requests;
`recovery` health of the ring and what is sent again.
"""
