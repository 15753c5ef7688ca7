"""Certificates for tests, made by the command openssl: a CA's, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpucoll import config

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def openssl(command: str, *words: str | Path) -> None:
    """Run the command openssl; skip the test where there is none."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    line = ["openssl", *command.split(), *map(str, words)]
    subprocess.run(line, check=True, capture_output=True, timeout=60)


class Authority:
    """A CA, and the certificates that it has signed.

    Parameters
    ----------
    folder : Path
        Of its files; is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.certificate, self._key = folder / "ca.pem", folder / "ca.key"
        files: list[str | Path] = [
            "-subj",
            f"/CN={folder.name}",
            "-keyout",
            self._key,
            "-out",
            self.certificate,
        ]
        openssl(f"req -x509 {_KEY} -days 30", *files)

    def environment(
        self,
        name: str = "rank",
        *,
        days: int = 30,
        extension: str = "",
        ca: Authority | None = None,
    ) -> dict[str, str]:
        """Return variables for a certificate that this CA has signed, made when first asked for.

        Parameters
        ----------
        name : str
            Of its files.
        days : int
            How long it holds from now; below 0: it has expired.
        extension : str
            Such as ``"extendedKeyUsage=serverAuth"``.
        ca : Authority, optional
            By whom the others' must be signed; default: this one.
        """
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        if not certificate.exists():
            request = self.folder / f"{name}.csr"
            options: list[str | Path] = []
            openssl(f"req {_KEY}", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
            if extension:
                (self.folder / f"{name}.ext").write_text(f"{extension}\n")
                options = ["-extfile", self.folder / f"{name}.ext"]
            signing: list[str | Path] = [
                "-CA",
                self.certificate,
                "-CAkey",
                self._key,
                "-CAcreateserial",
                *options,
            ]
            openssl(f"x509 -req -days {days}", "-in", request, *signing, "-out", certificate)
        return self.variables(certificate, key, ca)

    def below(self, name: str) -> Authority:
        """Return another CA, whose certificate this one has signed."""
        made = self.environment(name, extension="basicConstraints=critical,CA:TRUE")
        found = Authority.__new__(Authority)
        found.folder = self.folder / f"of {name}"
        found.folder.mkdir()
        found.certificate, found._key = Path(made[config.TLS_CERT]), Path(made[config.TLS_KEY])
        return found

    def variables(
        self, certificate: Path, key: Path, ca: Authority | None = None
    ) -> dict[str, str]:
        """Return variables that name these files."""
        return {
            config.TLS_CERT: str(certificate),
            config.TLS_KEY: str(key),
            config.TLS_CA: str((ca or self).certificate),
        }
