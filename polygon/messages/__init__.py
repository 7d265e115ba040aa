"""What people read: the catalogue of messages (`message`, which imports nothing of polygon), and reports made of
plans, which may import `cost`, `domain` and `planning`."""
