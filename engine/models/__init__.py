"""Architectures, weight loading and layers. Independent of scheduling, requests and text."""
