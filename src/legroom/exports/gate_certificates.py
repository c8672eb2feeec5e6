"""A self-signed certificate authority, and the gate's certificate."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from legroom.errors import LegroomError
from legroom.records import dataclass

_AUTHORITY_DAYS, _CERTIFICATE_DAYS = 3650, 365
_CLOCK_SKEW = datetime.timedelta(minutes=10)
_RENEW_BEFORE = datetime.timedelta(days=400)  # An authority must outlive the certificates that it signs.


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


def new_authority() -> KeyPair:
    """A new self-signed certificate authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _x509_name("legroom gate CA")
    builder = _certificate_builder(name, name, key, _AUTHORITY_DAYS, is_authority=True)
    return _pem_key_pair(builder.sign(key, hashes.SHA256()), key)


def new_certificate(authority: KeyPair, names: Sequence[str]) -> KeyPair:
    """A server's certificate for these DNS names, valid for a year and signed by the authority."""
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signing_key = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate_builder(_x509_name(names[0]), signer.subject, key, _CERTIFICATE_DAYS, is_authority=False)
    alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
    for extension in (alternative, usage, authority_key):
        builder = builder.add_extension(extension, critical=False)
    return _pem_key_pair(builder.sign(signing_key, hashes.SHA256()), key)


def stored_authority(path: str) -> KeyPair:
    """The authority in a PEM file, created if missing, so that later certificates stay trusted; else LegroomError."""
    file = Path(path)
    try:
        if file.exists():
            text = file.read_bytes()
            try:
                certificate = x509.load_pem_x509_certificate(text)
                key = serialization.load_pem_private_key(text[text.index(b"-----BEGIN PRIVATE KEY") :], None)
            except ValueError:
                hint = "legroom export gate makes one where there is none: name another path"
                raise LegroomError(f"{file} does not hold a certificate and its key", hint) from None
            if certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < _RENEW_BEFORE:
                raise LegroomError(
                    f"the authority in {file} ends soon", "name another file, and apply all that is written"
                )
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return _pem_key_pair(certificate, key)
        made = new_authority()
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as target:
            target.write(made.certificate + made.key)
        return made
    except OSError as error:
        hint = "name a file that may be written"
        raise LegroomError(f"could not use --ca-file {path}: {error.strerror}", hint) from None


def _x509_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, is_authority: bool
) -> x509.CertificateBuilder:
    """An unsigned certificate, valid for `days` from now, with the key usage of a CA or of a server."""
    now = datetime.datetime.now(datetime.UTC)
    signs = {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = x509.KeyUsage(**signs, **dict.fromkeys((*others, "decipher_only"), False))
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _CLOCK_SKEW)
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _pem_key_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    """The certificate and its unencrypted private key as PEM."""
    pem = serialization.Encoding.PEM
    kind, sealing = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return KeyPair(certificate.public_bytes(pem), key.private_bytes(pem, kind, sealing))
