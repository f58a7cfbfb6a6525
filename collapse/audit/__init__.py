"""Accounts for every byte of an output directory."""

from __future__ import annotations

from collapse.audit.findings import Audit as Audit
from collapse.audit.findings import Finding as Finding
from collapse.audit.run import audit as audit
