"""A hello of a library that is none: it leaves what it is told to, and fails on demand."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

library, what, folder = sys.argv[1:]
rank, ranks = int(os.environ.get("PMI_RANK", "0")), 2
fault = os.environ.get("HELLO_DOUBLE", "")
if fault == "fail" and rank:
    print("a last word")
    sys.exit(3)
if fault == "hang":
    time.sleep(600)
if fault == "alone":
    rank, ranks = 0, 1
MIB = 1 << 20
STAGES = [
    {"shared_bytes": 0, "private_bytes": 10 * MIB, "address_space_bytes": 100 * MIB,
     "descriptors": 5},
    {"shared_bytes": 10**15, "private_bytes": 12 * MIB, "address_space_bytes": 150 * MIB,
     "descriptors": 8 + rank},
    {"shared_bytes": 10**15 + 8 * MIB, "private_bytes": 16 * MIB, "address_space_bytes": 152 * MIB,
     "descriptors": 16 + rank},
]  # fmt: skip
found = {
    "rank": rank,
    "ranks": ranks,
    "sum": -1 if fault == "wrong" and rank else 1,
    "version": "Double 1.0",
    "joined_s": 0.25 + rank,
    "cpu_s": 0.5 - rank / 4,
    "peak_bytes": 50 * MIB,
    "stages": STAGES if what == "memory" else [],
}
Path(folder, f"{rank}.json").write_text(json.dumps(found))
