"""The web application: the same planner behind a JSON API, and the page that uses it."""
