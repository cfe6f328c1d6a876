"""The commands of `sluice`: serve, generate, chat, bench, demo, edge, top, healthcheck, keys, token and version."""
