"""Signed verdicts: ed25519 over what the ledger and the evidence say, when a key is configured.

    XTRAIN_SIGNING_KEY=FILE    a private key (PEM) with which every entry is signed from now on
    XTRAIN_TRUSTED_KEYS=FILE   public keys in hex, one a line, `#` begins a comment: only entries
                               signed by one of them count, and nothing else is promoted

A hash chain shows accidents, not forgery: whoever rewrites a file can compute the hashes anew. A
signature can only be made with the private key, so keep it where training code cannot read it.
Both variables unset: nothing is signed and nothing is asked for. `cryptography` is imported only
when a key is used.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtrain.errors import UsageError

KEY_VARIABLE = "XTRAIN_SIGNING_KEY"
TRUST_VARIABLE = "XTRAIN_TRUSTED_KEYS"
# The fields that a signature and a hash cannot be part of.
OUTSIDE = ("hash", "signature")


@dataclass(frozen=True)
class Signer:
    """A private key; `public` is its public half in hex, by which it is known and trusted."""

    public: str
    key: Any

    def sign(self, text: str) -> str:
        """The signature of a text, in hex."""
        return self.key.sign(text.encode()).hex()


def configured_signer() -> Signer | None:
    """The key that XTRAIN_SIGNING_KEY names, None when it is unset. UsageError if unreadable."""
    named = os.environ.get(KEY_VARIABLE)
    if not named:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(Path(named).read_bytes(), password=None)
    except OSError as error:
        raise UsageError(f"{KEY_VARIABLE}={named}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{KEY_VARIABLE}={named}: not an unencrypted PEM private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{KEY_VARIABLE}={named}: not an ed25519 key; xtrain-gate make-key FILE")
    return Signer(key.public_key().public_bytes_raw().hex(), key)


def trusted_keys() -> frozenset[str] | None:
    """The public keys of the file that XTRAIN_TRUSTED_KEYS names, None when it is unset.

    Raises UsageError for a file that cannot be read or holds no key.
    """
    named = os.environ.get(TRUST_VARIABLE)
    if not named:
        return None
    try:
        lines = Path(named).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TRUST_VARIABLE}={named} cannot be read: {error}") from error
    keys = [line.partition("#")[0].strip().lower() for line in lines]
    for key in filter(None, keys):
        if len(key) != 64 or set(key) - set("0123456789abcdef"):
            raise UsageError(f"{TRUST_VARIABLE}={named}: {key[:80]!r} is not a public key in hex")
    if not any(keys):
        raise UsageError(f"{TRUST_VARIABLE}={named} names no key")
    return frozenset(filter(None, keys))


def content_hash(entry: Mapping) -> str:
    """sha256 of the canonical JSON of an entry without its own hash and signature."""
    content = {key: value for key, value in entry.items() if key not in OUTSIDE}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def signed(entry: Mapping) -> dict:
    """The entry with `signed_by` and `signature`, or as it is when no key is configured."""
    signer = configured_signer()
    unsigned = {k: v for k, v in entry.items() if k not in ("signed_by", "signature")}
    if signer is None:
        return unsigned
    naming = {**unsigned, "signed_by": signer.public}
    return {**naming, "signature": signer.sign(content_hash(naming))}


def why_not_signed(entry: Mapping) -> str | None:
    """None when the signature of an entry is that of the key it names, else what is wrong."""
    if "signed_by" not in entry and "signature" not in entry:
        return "it is not signed"
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["signed_by"]))
        public.verify(bytes.fromhex(entry["signature"]), content_hash(entry).encode())
    except (InvalidSignature, KeyError, TypeError, ValueError):
        return "its signature is not that of the key it names"
    return None


def is_believed(entry: Mapping, trusted: frozenset[str] | None) -> bool:
    """Whether an entry counts: always when no keys are configured, else if one of them signed."""
    if trusted is None:
        return True
    return entry.get("signed_by") in trusted and why_not_signed(entry) is None


def make_key(path: Path) -> str:
    """Write a new private key, readable by its owner only; return its public key in hex.

    Raises UsageError when the file exists or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"{path}: cannot write a key there: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return key.public_key().public_bytes_raw().hex()
