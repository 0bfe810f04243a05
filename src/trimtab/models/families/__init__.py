"""One file per family: what its configuration says, as layers in forward order."""
