"""The version of the server, and of every client that is released with it."""

VERSION = "0.1.0"
