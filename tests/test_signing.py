"""Signatures: they fit what was signed and nothing else, and each fault has its own name."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from collapse.audit import audit
from collapse.checkpoint import Checkpoint
from collapse.manifest import MANIFEST, SIGNATURE, file_names
from collapse.options import DEFAULTS, make_options
from collapse.plan import Plan
from collapse.signing import (
    PASSWORD,
    KeyFileError,
    fingerprint,
    fits,
    load_private_key,
    load_public_key,
    read_signature,
    sign_manifest,
)
from collapse.verify import verify
from tests.command import Command
from tests.exported import WEIGHTS, details
from tests.test_audit import refit
from tests.tiny import tiny_llama

OURS, THEIRS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
OPENSSL = shutil.which("openssl")


def private_pem(key: object, encryption: KeySerializationEncryption | None = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())  # type: ignore[attr-defined,no-any-return]


def public_pem(key: object) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def signed(out: Path) -> Path:
    sign_manifest(out, OURS)
    return out


def rules(folder: Path, key: Ed25519PrivateKey = OURS) -> set[str]:
    return {finding.rule for finding in audit(folder, key=key.public_key()).findings}


# Must be quiet.


def test_a_signed_output_is_clean_and_verified(signed: Path, llama: Checkpoint, plan: Plan) -> None:
    assert rules(signed) == set()
    assert verify(signed, llama, plan=plan, static_only=True).status == "verified"
    assert SIGNATURE not in file_names(signed)
    assert SIGNATURE not in Checkpoint.open(signed).side_files


def test_the_same_manifest_gets_the_same_signature(signed: Path) -> None:
    first = (signed / SIGNATURE).read_bytes()
    sign_manifest(signed, OURS)
    assert (signed / SIGNATURE).read_bytes() == first


def test_a_signature_nobody_asks_for_is_mentioned(signed: Path) -> None:
    found = audit(signed)
    assert found.findings == ()
    assert "collapse.sig is there, but without --verify-key it was not checked" in found.notes


def test_an_output_without_a_signature_is_clean_unless_one_is_wanted(out: Path) -> None:
    assert audit(out).findings == ()
    assert rules(out) == {"signature-missing"}


def test_exports_are_unsigned_by_default() -> None:
    assert DEFAULTS.sign is None
    assert make_options(sign=None).sign is None
    assert make_options(sign=OURS).sign is OURS


# Tampering.


def change_plan(folder: Path, *, refitted: bool) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["plan"]["rewrites"][0]["evidence"]["claim"] = "trust me"
    if refitted:
        manifest["plan_digest"] = Plan.model_validate(manifest["plan"]).digest
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def change_signature(folder: Path, **fields: str) -> None:
    value = json.loads((folder / SIGNATURE).read_bytes()) | fields
    (folder / SIGNATURE).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def change_weights(folder: Path, *, refitted: bool) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (folder / WEIGHTS).write_bytes(raw)
    if refitted:
        refit(folder)


TAMPERING: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a weight": (lambda folder: change_weights(folder, refitted=False), {"file-changed"}),
    "a weight, digest made to fit": (lambda folder: change_weights(folder, refitted=True), {"signature-mismatch"}),
    "the config": (lambda folder: (folder / "config.json").write_text("{}"), {"file-changed"}),
    "the plan": (lambda folder: change_plan(folder, refitted=False), {"signature-mismatch", "plan-edited"}),
    "the plan, digest made to fit": (lambda folder: change_plan(folder, refitted=True), {"signature-mismatch"}),
    "a space in the manifest": (
        lambda folder: (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes() + b" "),
        {"signature-mismatch", "manifest-damaged"},
    ),
    "the signature": (lambda folder: change_signature(folder, signature="0" * 128), {"signature-mismatch"}),
    "the name of the key": (lambda folder: change_signature(folder, key="0" * 64), {"signature-key"}),
    "a field more": (lambda folder: change_signature(folder, note="x"), {"signature-damaged"}),
    "a signature too short": (lambda folder: change_signature(folder, signature="00"), {"signature-damaged"}),
    "a signature with an end": (
        lambda folder: (folder / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes() + b" " * 9000),
        {"signature-damaged"},
    ),
    "no signature": (lambda folder: (folder / SIGNATURE).unlink(), {"signature-missing"}),
    "signed by somebody else": (lambda folder: sign_manifest(folder, THEIRS), {"signature-key"}),
    "somebody else's, under our name": (
        lambda folder: (sign_manifest(folder, THEIRS), change_signature(folder, key=fingerprint(OURS.public_key()))),
        {"signature-mismatch"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERING)
def test_tampering_is_named(signed: Path, case: str) -> None:
    tamper, expected = TAMPERING[case]
    tamper(signed)
    assert rules(signed) == expected


def test_the_wrong_key_is_named_with_both_keys(signed: Path) -> None:
    (finding,) = audit(signed, key=THEIRS.public_key()).findings
    wanted, there = fingerprint(THEIRS.public_key())[:16], fingerprint(OURS.public_key())[:16]
    assert (finding.rule, finding.what) == ("signature-key", f"is made with key {there}, expected was {wanted}")


@pytest.mark.parametrize("case", ["a field more", "a signature too short", "a signature with an end"])
def test_verification_refutes_a_file_that_is_no_signature(signed: Path, llama: Checkpoint, case: str) -> None:
    TAMPERING[case][0](signed)
    verdict = verify(signed, llama, static_only=True)
    assert verdict.status == "refuted"
    assert "collapse.sig" in details(verdict)


def test_a_link_is_no_signature(signed: Path) -> None:
    (signed / SIGNATURE).rename(signed.parent / "elsewhere")
    (signed / SIGNATURE).symlink_to(signed.parent / "elsewhere")
    assert rules(signed) == {"signature-damaged"}
    (signed.parent / "elsewhere").unlink()
    assert rules(signed) == {"signature-damaged"}, "also one that leads nowhere"


def test_a_signature_in_a_folder_is_an_unlisted_file(signed: Path) -> None:
    (signed / "old").mkdir()
    shutil.copy(signed / SIGNATURE, signed / "old" / SIGNATURE)
    assert rules(signed) == {"file-unlisted"}


# Keys.


def test_keys_are_read_from_pem(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(private_pem(OURS))
    (tmp_path / "key.pub.pem").write_bytes(public_pem(OURS))
    key, public = load_private_key(tmp_path / "key.pem"), load_public_key(tmp_path / "key.pub.pem")
    assert fingerprint(key.public_key()) == fingerprint(public) == fingerprint(OURS.public_key())


def test_a_password_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(private_pem(OURS, BestAvailableEncryption(b"secret")))
    monkeypatch.delenv(PASSWORD, raising=False)
    with pytest.raises(KeyFileError, match=r"key.pem: is protected by a password; give it in COLLAPSE_KEY_PASSWORD"):
        load_private_key(path)
    monkeypatch.setenv(PASSWORD, "wrong")
    with pytest.raises(KeyFileError, match="the password in COLLAPSE_KEY_PASSWORD is wrong") as caught:
        load_private_key(path)
    assert "'wrong'" not in str(caught.value) and caught.value.__suppress_context__
    monkeypatch.setenv(PASSWORD, "secret")
    assert fingerprint(load_private_key(path).public_key()) == fingerprint(OURS.public_key())
    path.write_bytes(private_pem(OURS))
    assert fingerprint(load_private_key(path).public_key()) == fingerprint(OURS.public_key()), "not needed, no harm"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "holds no private key in PEM"),
        (b"hello", "holds no private key in PEM"),
        (public_pem(OURS), "is a public key"),
        (private_pem(generate_private_key(SECP256R1())), "is no Ed25519 key"),
    ],
)
def test_what_cannot_sign_is_one_clear_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(KeyFileError, match=message):
        load_private_key(tmp_path / "key.pem")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"hello", "holds no public key in PEM"),
        (private_pem(OURS), "is a private key"),
        (public_pem(generate_private_key(SECP256R1())), "is no Ed25519 key"),
    ],
)
def test_what_cannot_check_is_one_clear_line(
    command: Command, signed: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "key.pem").write_bytes(content)
    found = command("audit", signed, "--verify-key", tmp_path / "key.pem")
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert message in found.err


def test_a_bad_key_stops_an_export_before_any_work(command: Command, tmp_path: Path) -> None:
    found = command("export", tmp_path / "no-model", "-o", tmp_path / "out", "--sign", tmp_path / "key.pem")
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert "key.pem: cannot be read" in found.err


def test_export_signs_what_audit_checks(command: Command, tmp_path: Path) -> None:
    model, out = tiny_llama(tmp_path / "model").root, tmp_path / "out"
    (tmp_path / "key.pem").write_bytes(private_pem(OURS))
    (tmp_path / "key.pub.pem").write_bytes(public_pem(OURS))
    schema = json.dumps({"type": "log", "tokens": [1, 2, 3, 4, 5, 6, 7, 8]})
    arguments = ("--schema", schema, "--pass", "unread-weights", "--prompts", 1, "--sign", tmp_path / "key.pem", "-q")
    made = command("export", model, "-o", out, *arguments)
    assert made.code == 0, made.err
    checked = command("audit", out, "--source", model, "--verify-key", tmp_path / "key.pub.pem")
    assert (checked.code, "clean" in checked.out) == (0, True), checked.out
    assert fits(read_signature(out), (out / MANIFEST).read_bytes(), OURS.public_key())
    again = command("export", model, "-o", out, *arguments[:-3], "-q", "--force")
    assert (again.code, (out / SIGNATURE).exists()) == (0, False), "a signed output is ours, and may be replaced"


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_openssl_makes_the_keys_and_agrees_with_the_signature(out: Path, tmp_path: Path) -> None:
    def openssl(*arguments: object) -> str:
        run = subprocess.run([str(OPENSSL), *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        return run.stdout

    openssl("genpkey", "-algorithm", "ed25519", "-out", "key.pem")
    openssl("pkey", "-in", "key.pem", "-pubout", "-out", "key.pub.pem")
    sign_manifest(out, load_private_key(tmp_path / "key.pem"))
    assert audit(out, key=load_public_key(tmp_path / "key.pub.pem")).findings == ()
    (tmp_path / "raw").write_bytes(bytes.fromhex(read_signature(out).signature))
    check = ("pkeyutl", "-verify", "-pubin", "-inkey", "key.pub.pem", "-rawin", "-in", out / MANIFEST)
    assert "Signature Verified Successfully" in openssl(*check, "-sigfile", "raw")
