"""One optimizer step on one rank: buckets as generators, and the pipeline that interleaves them."""
