"""What no plan can beat. May import `cost`."""
