"""The front door: generations for any transport on one side, the ring on the other.

A request: an adapter (`calls` for sluice.v1 over gRPC, `oip` for Open Inference) reads a `Call` and asks the
`GenerationService`, which has it translated (`contract`), admitted and sent by the `RequestManager`, and gives a
`GenerationStream` (one reader of one `OpenRequest`) or a `ConverseSession` (many, by tag). `DetachedSessions` keeps
those that outlive their reader; `PeerGateways` reaches those of other gateways.
A token: ring → `Gateway.handle` → `RequestManager.handle` → `OpenRequest.handle` → its `Delivery`, which wakes the
stream → `EventSequence.next` takes it as an event → the adapter writes that.
An `OpenRequest` has parts: `Delivery` (what waits for its reader), `Replay` (how it is sent again), `GrantedCredit`,
`Accounting`. One verb each: messages of the ring are handled, events are written, readers attach and detach.
Rooms: `access` who may ask and how much, `calls` and `oip` adapters, `connections` sockets and what they may take,
`contract` what is asked and answered, `generation` the service, `requests` what is open, `recovery` what is sent again.
"""
