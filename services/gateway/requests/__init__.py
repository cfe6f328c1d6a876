"""The open requests of a gateway: admission, deltas, history, and how each ends. Independent of the transport."""
