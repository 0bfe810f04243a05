"""Plans and placements as files."""
