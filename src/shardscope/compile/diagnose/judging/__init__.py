"""How a compiled fragment or program compares with eager execution."""
