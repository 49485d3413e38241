"""The steps on sound."""
