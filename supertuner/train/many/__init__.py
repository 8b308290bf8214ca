"""Many processes that train one run together: how they find each other, add up, share out, and notice who is gone."""
