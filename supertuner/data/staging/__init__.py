"""From a source to a sealed arena: what fits, who reads, what is kept and what is set aside."""
