"""What a run keeps of each subject, and what a snapshot of its record holds: the fields of these classes, in order.

The state of a run is one tree of facts (`states/state.RunFacts`). Whatever else the state has is an index: it is made
from the facts, in the constructor of the class that has it. A snapshot encodes the tree as it is and decodes it again
(`record/snapshots.py`). A list or dict of facts is changed in place and never replaced where an index refers to it.
"""

import msgspec


class Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, eq=False):
    """Base of all classes of facts. Two objects are equal only if they are the same."""
