"""Connections of clients: who listens, what is accepted, what they may take, and which are cut. Knows no request."""
