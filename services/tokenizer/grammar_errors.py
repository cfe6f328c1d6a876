"""Defines the error of a constraint that cannot be converted to a grammar."""


class FormError(Exception):
    """The source is not valid in its form; `place` says where, or is empty."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
