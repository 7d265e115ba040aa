"""The lab's parts: hosts, Linux namespaces, shaping, the running lab. May import `polygon`, never torch."""
