from services.gateway.process import OTHER_FILES, most_connections


def test_connections_leave_files_for_what_else_a_gateway_does() -> None:
    assert most_connections(20_000) == 20_000 - OTHER_FILES
    assert most_connections(1024) == 1024 - OTHER_FILES
    assert most_connections(256) == 128
    assert most_connections(-1) == 1 << 20  # RLIM_INFINITY
