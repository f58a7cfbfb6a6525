"""Healing: a short distillation of a collapsed model from its source, of what the rewrites touched."""
