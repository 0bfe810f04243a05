"""Vision data parallel: each rank of a group encodes its share of the images, gradients stay exact."""
