"""Learned optimisers shipped with the package: `<name>.safetensors`, read by `metamd.load("<name>")`."""
