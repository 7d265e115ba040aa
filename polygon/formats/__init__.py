"""All file input and output: schema, conversions, other programs' formats. May import `domain`."""
