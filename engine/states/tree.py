"""What the state is made of: typed records whose classes declare each field once.

The state of a run is one tree with `State` at the root. The annotations in the body of a class declare its fields.
Every other attribute can be computed from these fields, and is rebuilt after a snapshot was loaded. Snapshots write the
declared fields and nothing else (`record/snapshots.py`).
"""

from functools import lru_cache
from typing import Any, ClassVar, get_origin, get_type_hints


@lru_cache
def declared(cls: Any) -> dict[str, Any]:
    """The fields of a class of the tree, with their types."""
    hints = get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if not name.startswith("_") and get_origin(hint) is not ClassVar}
