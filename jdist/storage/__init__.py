"""Files that are whole or absent: sealed JSON, manifests, arrays, hashes."""
