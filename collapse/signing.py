"""Signs `collapse.json` with Ed25519, and so the digest of every file that it lists, and the plan.

The signature stands beside it in `collapse.sig`: JSON with the SHA-256 of the public key (DER), which names a wrong
key, and the signature over the very bytes of `collapse.json`, so that other tools can check it as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field, ValidationError

from collapse.canonical import dumps
from collapse.errors import CheckpointError, CollapseError
from collapse.manifest import MANIFEST, SIGNATURE
from collapse.plan import Record, first_problem

PASSWORD = "COLLAPSE_KEY_PASSWORD"  # the environment variable; nothing ever prompts
LARGEST = 4096  # bytes of a key file or a signature file; both are far smaller
MAKE = "make one with `openssl genpkey -algorithm ed25519 -out key.pem`"
EXTRACT = "write it with `openssl pkey -in key.pem -pubout -out key.pub.pem`"


class KeyFileError(CollapseError):
    """A key file that cannot be used."""


class Signature(Record):
    """The content of `collapse.sig`, both values in hexadecimal digits."""

    format: Literal["collapse-signature/1"] = "collapse-signature/1"
    key: str = Field(pattern="^[0-9a-f]{64}$")
    signature: str = Field(pattern="^[0-9a-f]{128}$")


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key (PEM); the password of an encrypted one is taken from `COLLAPSE_KEY_PASSWORD`.

    Raises `KeyFileError` for anything but an Ed25519 key, and where a password is missing or wrong.
    """
    raw, password = _read(path, MAKE), os.environ.get(PASSWORD)
    if b"PUBLIC KEY-----" in raw:
        raise KeyFileError("is a public key", where=str(path), fix="signing takes the private one")
    encrypted = b"ENCRYPTED" in raw
    if encrypted and not password:
        raise KeyFileError("is protected by a password", where=str(path), fix=f"give it in {PASSWORD}")
    try:
        key = load_pem_private_key(raw, password.encode() if encrypted and password else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        problem = f"is damaged, or the password in {PASSWORD} is wrong" if encrypted else "holds no private key in PEM"
        raise KeyFileError(problem, where=str(path), fix=MAKE) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError("is no Ed25519 key", where=str(path), fix=MAKE)
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key (PEM); raises `KeyFileError` for anything but an Ed25519 key."""
    raw = _read(path, EXTRACT)
    if b"PRIVATE KEY-----" in raw:
        raise KeyFileError("is a private key", where=str(path), fix=f"checking takes the public one; {EXTRACT}")
    try:
        key = load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError("holds no public key in PEM", where=str(path), fix=EXTRACT) from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError("is no Ed25519 key", where=str(path), fix=EXTRACT)
    return key


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 (hex) of the key in DER, which names it in signatures and findings."""
    total = hashes.Hash(hashes.SHA256())
    total.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return total.finalize().hex()


def sign_manifest(folder: Path, key: Ed25519PrivateKey) -> None:
    """Write `collapse.sig` over the bytes of `collapse.json`; call it when that is final."""
    signed = key.sign((folder / MANIFEST).read_bytes()).hex()
    made = Signature(key=fingerprint(key.public_key()), signature=signed)
    (folder / SIGNATURE).write_text(dumps(made.model_dump(mode="json")), encoding="utf-8")


def read_signature(folder: Path) -> Signature:
    """Read `collapse.sig`; raises `CheckpointError` unless it is just what `sign_manifest` writes, byte for byte."""
    path = folder / SIGNATURE
    if path.is_symlink() or not path.is_file():
        raise CheckpointError("no plain file", where=SIGNATURE, fix="sign the model again")
    with path.open("rb") as stream:
        raw = stream.read(LARGEST)
    try:
        found = Signature.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(first_problem(error), where=SIGNATURE, fix="sign the model again") from None
    if raw != dumps(found.model_dump(mode="json")).encode():
        raise CheckpointError("holds more than a signature", where=SIGNATURE, fix="sign the model again")
    return found


def fits(signature: Signature, manifest: bytes, key: Ed25519PublicKey) -> bool:
    """Whether `signature` was made with the private half of `key`, over just these bytes of `collapse.json`."""
    try:
        key.verify(bytes.fromhex(signature.signature), manifest)
    except InvalidSignature:
        return False
    return True


def _read(path: Path, fix: str) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(LARGEST)
    except OSError as error:
        raise KeyFileError(f"cannot be read ({error.strerror})", where=str(path), fix=fix) from None
