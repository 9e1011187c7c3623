"""One file a pass; `manager.PASSES` names them in the order they run."""
