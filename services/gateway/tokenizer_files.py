"""The files of a model's tokenizer as one archive, for gateways in front that encode prompts and render chats.

An uncompressed zip with fixed times: the same files give the same bytes.
"""

import dataclasses
import hashlib
import io
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.checkpoint.digests import FileKey

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer.model",
)
CHUNK_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """The archive, and its SHA-256 in hex."""

    data: bytes
    digest: str

    def chunks(self) -> list[bytes]:
        """Returns the archive in pieces for messages."""
        return [self.data[at : at + CHUNK_BYTES] for at in range(0, len(self.data), CHUNK_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer's files in `directory`, as they were when this was made."""

    directory: Path
    files: tuple[tuple[str, FileKey], ...]

    @classmethod
    def of(cls, directory: Path) -> "TokenizerFiles":
        """Notes which files there are, without reading them."""
        found = [(name, directory / name) for name in NAMES]
        return cls(directory, tuple((name, FileKey.of(path.stat())) for name, path in found if path.is_file()))

    def archive(self) -> TokenizerArchive:
        """Reads the files. Raises `ServiceError` MODEL_CHANGED if they are not those that were noted."""
        import zipfile  # which few gateways need

        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for name, _ in self.files:
                archive.writestr(zipfile.ZipInfo(name), self._read(name))
        if TokenizerFiles.of(self.directory) != self:
            raise _replaced()
        data = made.getvalue()
        return TokenizerArchive(data, hashlib.sha256(data).hexdigest())

    def _read(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except OSError as error:
            raise _replaced() from error


NO_FILES = TokenizerFiles(Path(), ())


def _replaced() -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE,
        "MODEL_CHANGED",
        "the tokenizer's files were replaced, and this server still serves the earlier ones: try again later",
        retry_after_s=1.0,
    )
