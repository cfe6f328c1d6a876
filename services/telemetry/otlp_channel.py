"""How connections to an OTLP collector differ from gRPC's usual ones."""

from typing import Any

# A channel measures the way to its server by a ping for each answer, to find out how much the server may send ahead.
# A collector's answers are empty, and each ping wakes several threads: they were half of what a request costs.
CHANNEL_OPTIONS: Any = (("grpc.http2.bdp_probe", 0),)  # the SDK's annotation knows options of text only
