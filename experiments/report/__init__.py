"""Reports: their parts, figures, published numbers, and the page that shows them."""
