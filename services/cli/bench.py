"""stub"""


def bench() -> None: ...
