"""Sources that are made of other sources: concat, mix and subset."""
