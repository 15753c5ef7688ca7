"""Turn OpenSSL's errors between two ranks into sentences that tell what to do."""

from __future__ import annotations

import ssl
from typing import Final

from gpucoll import config
from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.one_sided_tls import EVERYWHERE

__all__ = ["refusal", "remedy"]

_NO_TLS_THERE: Final = (
    "speaks no TLS 1.3: it has no certificates, or an OpenSSL before 1.1.1. This rank has "
    f"certificates: {EVERYWHERE}"
)
_NO_CERTIFICATE: Final = f"showed no certificate: {EVERYWHERE}"
_OTHER_CA: Final = (
    f"all certificates of a job must be signed by the CA whose certificate {config.TLS_CA} names, "
    f"the same on every rank; intermediate certificates belong into {config.TLS_CERT}"
)
_PURPOSE: Final = (
    "a rank both connects and accepts, so extendedKeyUsage must name both clientAuth and "
    "serverAuth, or not be there"
)
_REMEDIES: Final = {
    7: _OTHER_CA,
    9: "compare the clocks of the hosts",
    10: "make a new one, and compare the clocks of the hosts",
    18: _OTHER_CA,
    19: _OTHER_CA,
    20: _OTHER_CA,
    21: _OTHER_CA,
    24: f"{config.TLS_CA} must name a certificate that may sign others (CA:TRUE)",
    26: _PURPOSE,
}
"""By OpenSSL's number of the error (X509_V_ERR_...)."""
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": f"did not get this rank's certificate: {EVERYWHERE}",
    "UNKNOWN_CA": f"refuses this rank's certificate, as of an unknown CA: {_OTHER_CA}",
    "CERTIFICATE_EXPIRED": "refuses this rank's certificate, as expired: compare the clocks of the "
    "hosts",
    "UNSUPPORTED_CERTIFICATE": f"refuses this rank's certificate: {_PURPOSE}",
    "PROTOCOL_VERSION": _NO_TLS_THERE,
    "DECRYPT_ERROR": f"refuses this rank's certificate, as not signed by that CA: {_OTHER_CA}",
}
"""By the alert that the other end has sent."""
_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NO_CERTIFICATE,
    "UNSUPPORTED_PROTOCOL": _NO_TLS_THERE,
    "WRONG_VERSION_NUMBER": _NO_TLS_THERE,
    "RECORD_LAYER_FAILURE": _NO_TLS_THERE,
    "HTTP_REQUEST": "is no gpucoll: it speaks HTTP",
}


def remedy(error: ssl.SSLCertVerificationError) -> str:
    """Return what is wrong with a certificate, and the remedy."""
    what = _REMEDIES.get(error.verify_code, _OTHER_CA)
    return f"{error.verify_message}: {what}"


def refusal(error: ssl.SSLError) -> AuthenticationError:
    """Return the error for a failed TLS handshake; its text follows the other end's name."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"showed a certificate that this rank does not accept, {remedy(error)}"
        )
    reason = error.reason or ""
    if reason in _REASONS:
        return AuthenticationError(_REASONS[reason])
    alert = reason.partition("ALERT_")[2]
    if alert in _ALERTS:
        return AuthenticationError(_ALERTS[alert])
    if alert:
        words = alert.replace("_", " ").lower()
        return AuthenticationError(f"refuses this connection by TLS ({words})")
    return AuthenticationError(
        f"sent what is no TLS, or was changed on the way ({reason or error.strerror or error})"
    )
