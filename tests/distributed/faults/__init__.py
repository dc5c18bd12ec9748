"""Faults planted by patching the product, for the parity tests to catch: each a context manager, by name.

They are the public bugs of this field (see SCENARIOS): a reduction left out, a division forgotten or doubled, a wrong
group, a mean per rank, a seed that depends on the rank.
"""

from tests.distributed.faults import dense, experts, sequence
from tests.distributed.faults.registry import FAULTS

__all__ = ["FAULTS", "dense", "experts", "sequence"]
