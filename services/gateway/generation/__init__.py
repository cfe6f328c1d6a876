"""The generation service: typed requests in, typed events out, errors as `ServiceError`. Independent of the
transport."""
