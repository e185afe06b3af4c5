curl -s localhost:8126
