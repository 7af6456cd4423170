"""Large bodies and results as files beside the database, and addresses that need no token."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tunebook.serve.errors import ApiError, not_found
from tunebook.serve.records import new_id
from tunebook.serve.store import Store

ADDRESS_S = 24 * 3600.0
"""How long an address can be used."""


class Payloads:
    """Files of a session, named by ids that the server makes."""

    def __init__(self, home: Path, store: Store) -> None:
        """Takes the folder.

        Args:
            home: of the server.
            store: remembers whose a payload is, and what addresses are signed with.
        """
        self._folder = home / "payloads"
        self._folder.mkdir(exist_ok=True)
        self._store = store
        self._key = bytes.fromhex(store.meta("address_key", secrets.token_hex(32)))

    def new(self, session_id: str, now: float) -> str:
        """The id of a payload that is to be uploaded."""
        identity = new_id("pl")
        self._store.add_payload(identity, session_id, now)
        return identity

    def path(self, identity: str) -> Path:
        """The file of a payload that the server knows."""
        return self._folder / identity

    def partial_path(self, identity: str) -> Path:
        """Where an upload goes until it is whole; another try has another."""
        return self._folder / f"{identity}.{secrets.token_hex(4)}.part"

    def read(self, session_id: str, identity: str) -> bytes:
        """What was uploaded.

        Raises:
            ApiError: the session has no such payload, or it is not there yet.
        """
        if not self._store.has_payload(identity, session_id):
            raise not_found("payload", identity)
        try:
            return self.path(identity).read_bytes()
        except FileNotFoundError as error:
            raise ApiError(
                400, f"payload_id: {identity} has not been uploaded", param="payload_id"
            ) from error

    def write(self, session_id: str, content: bytes, now: float) -> str:
        """The id of a new payload of the server's own."""
        identity = self.new(session_id, now)
        partial = self.partial_path(identity)
        partial.write_bytes(content)
        os.replace(partial, self.path(identity))
        return identity

    def check_kept(self, identity: str) -> None:
        """Returns if a payload may still be uploaded.

        Raises:
            ApiError: it is forgotten.
        """
        if not self._store.keeps_payload(identity):
            message = f"the time to upload {identity} is over; ask for a new address"
            raise ApiError(410, message, code="payload_gone")

    def keep(self, identity: str, partial: Path) -> None:
        """Takes an upload that is whole.

        Raises:
            ApiError: it is forgotten, so nothing would ever delete the file.
        """
        with self._store.transaction():
            self.check_kept(identity)
            os.replace(partial, self.path(identity))

    def forget(self, *, before: float) -> None:
        """Deletes payloads made before a time."""
        for identity in self._store.take_payloads(before=before):
            self.path(identity).unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Deletes files of no payload, as of uploads cut short; none may be under way."""
        for file in self._folder.iterdir():
            if not self._store.keeps_payload(file.name):
                file.unlink(missing_ok=True)

    def signature(self, name: str, expires: int) -> str:
        """What makes an address valid."""
        return hmac.new(self._key, f"{expires}/{name}".encode(), hashlib.sha256).hexdigest()

    def address(self, name: str, now: float, *, valid_s: float = ADDRESS_S) -> str:
        """A path that can be used without a token for a while.

        Args:
            name: what it is for: `up/<id>`, `down/<id>` or `file/<checkpoint>/<variant>/<file>`.
            now: seconds since the epoch.
            valid_s: seconds for which it can be used.
        """
        expires = int(now + valid_s)
        return f"/v1/rl/files/{expires}-{self.signature(name, expires)}/{name}"

    def check_address(self, proof: str, name: str, now: float) -> None:
        """Returns if an address is one of ours and not too old.

        Raises:
            ApiError: it is not.
        """
        expires, _, signature = proof.partition("-")
        good = expires.isascii() and expires.isdigit() and len(expires) < 16
        if not good or not hmac.compare_digest(
            self.signature(name, int(expires)).encode(), signature.encode()
        ):
            raise ApiError(403, "this address is not valid", code="bad_address")
        if int(expires) < now:
            raise ApiError(403, "this address is too old; ask for a new one", code="old_address")
