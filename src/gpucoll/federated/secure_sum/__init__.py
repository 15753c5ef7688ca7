"""Sums that show no addend: `SecureSum` between clients and a server, `secure_all_reduce` on ranks.

They need the package cryptography (``pip install 'gpucoll[federated]'``). See `docs/federated.md`.
"""

from gpucoll.federated.secure_sum.client import SecureSumClient
from gpucoll.federated.secure_sum.protocol import SecureSum
from gpucoll.federated.secure_sum.ranks import secure_all_reduce
from gpucoll.federated.secure_sum.server import SecureSumServer

__all__ = ["SecureSum", "SecureSumClient", "SecureSumServer", "secure_all_reduce"]
