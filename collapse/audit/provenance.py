"""Says whether the manifest is whole, canonical, and signed with the expected key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from collapse.audit.findings import Finding, first_difference
from collapse.canonical import dumps
from collapse.errors import CheckpointError
from collapse.manifest import MANIFEST, SIGNATURE, Manifest
from collapse.signing import fingerprint, fits, read_signature


def signature_findings(folder: Path, manifest: bytes, key: Ed25519PublicKey | None) -> Iterator[Finding]:
    """Yield what is wrong with `collapse.sig`, the signature of the bytes `manifest`; without `key`, with its form."""
    path = folder / SIGNATURE
    if not path.is_symlink() and not path.exists():
        if key is not None:
            yield Finding(rule="signature-missing", file=SIGNATURE, what="is missing, so nobody vouches for the model")
        return
    try:
        signature = read_signature(folder)
    except CheckpointError as error:
        yield Finding(rule="signature-damaged", file=SIGNATURE, what=error.what)
        return
    if key is None:
        return
    if signature.key != fingerprint(key):
        what = f"is made with key {signature.key[:16]}, expected was {fingerprint(key)[:16]}"
        yield Finding(rule="signature-key", file=SIGNATURE, what=what)
    elif not fits(signature, manifest, key):
        what = "does not fit collapse.json: the plan, a digest in it, or the signature was changed after signing"
        yield Finding(rule="signature-mismatch", file=SIGNATURE, what=what)


def manifest_findings(raw: bytes, manifest: Manifest) -> Iterator[Finding]:
    """Yield what is wrong with a manifest that could be read: its form, and whether it fits its own plan."""
    try:
        right, digest = dumps(json.loads(raw)).encode(), manifest.plan.digest
    except ValueError as error:  # infinities, which our JSON never has
        yield Finding(rule="manifest-damaged", file=MANIFEST, what=f"is not in canonical form ({error})")
        return
    at = first_difference(raw, right)
    if at is not None:
        what = "is not in canonical form, so it may hold other bytes"
        yield Finding(rule="manifest-damaged", file=MANIFEST, what=what, offset=at)
    if digest != manifest.plan_digest:
        yield Finding(rule="plan-edited", file=MANIFEST, what="the plan does not have the digest beside it")
    if manifest.plan.source != manifest.source.digest:
        yield Finding(rule="plan-edited", file=MANIFEST, what="the plan was made for another source")
