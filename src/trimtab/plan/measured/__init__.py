"""Plans held against what was measured, or what their decisions need."""
