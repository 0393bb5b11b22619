"""Reports: JSON lines are the source, everything a person reads is derived from them."""
