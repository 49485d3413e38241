"""The steps that drop and rename fields."""
