"""`conformance check TARGET --against reference`: sizes that no fixture holds, recorded when they are asked for."""
