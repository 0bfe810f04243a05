"""A placed model: weights where the placement says, moved or copied as modules run."""
