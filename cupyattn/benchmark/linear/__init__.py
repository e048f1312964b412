"""Times of products with a weight."""
