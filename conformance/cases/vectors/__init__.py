"""Hand-made vectors: for each known mistake the smallest input that reveals it, where no recorded trace does."""
