"""Numbers kept in fewer bits: moments, master weights, factors, and the noise that rounds them."""
