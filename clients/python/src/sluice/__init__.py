"""Client side of sluice. `sluice.v1` holds the generated stubs of the contract."""
