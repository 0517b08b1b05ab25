"""The certificates and keys of a federation: its own authority, the server's certificate, a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError, reason

CERTIFICATE_LIFETIME = datetime.timedelta(days=825)
"""The longest that common software accepts."""
HOST_NAME = re.compile(r"(\*\.)?(?!-)[\w-]{1,63}(?<!-)(\.(?!-)[\w-]{1,63}(?<!-))*", re.ASCII)
"""The form of names in DNS and in container networks."""


def make_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """Write ca.crt for everybody, server.crt and server.key for the SuperLink; forget the authority's key."""
    names = [_name(host) for host in hosts]
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_to_overwrite(folder / "ca.crt", folder / "server.key", folder / "server.crt")
    authority, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedslr federation")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    server = (
        _certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")]), issuer, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    _write_secret(folder / "server.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    write_durably(folder / "server.crt", server.public_bytes(pem))
    write_durably(folder / "ca.crt", root.public_bytes(pem))


def make_node_key(path: Path) -> Path:
    """Write a node's private key, and beside it the public key to be registered; return the public key's path."""
    public = path.with_name(path.name + ".pub")
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_to_overwrite(path, public)
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _write_secret(path, secret)
    form = serialization.PublicFormat.OpenSSH
    write_durably(public, key.public_key().public_bytes(serialization.Encoding.OpenSSH, form) + b"\n")
    return public


def registered_key(folder: Path, client: int) -> bytes:
    """Return the public key of a client in the SuperLink's form; raise a FedslrError if there is none."""
    path = folder / f"{client}.pub"
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedslrError(f"federation.keys: {path} is no public key: {reason(error)}") from None
    data: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return data


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ a little.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + CERTIFICATE_LIFETIME)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        is_number = "." in host and host.rpartition(".")[2].isdigit()  # no name of a network ends in one
        if len(host) > 253 or HOST_NAME.fullmatch(host) is None or is_number:
            expected = "a name such as superlink.example.org or an address such as 10.0.0.7, without a port"
            raise FedslrError(f"--host: got '{host}', expected {expected}") from None
        return x509.DNSName(host)


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise FedslrError(f"{path} is already there; choose another path, or remove it first")


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    with disk_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink()
            raise
