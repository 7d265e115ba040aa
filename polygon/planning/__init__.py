"""From an allocation of devices to stages to a complete plan: decode, routes, layer split, objectives."""
