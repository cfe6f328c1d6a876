"""An HTTP server with OpenAI's API, in front of the gateway. A client of sluice.v1 only."""
