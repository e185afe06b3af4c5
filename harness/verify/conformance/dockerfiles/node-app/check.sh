curl -s localhost:8125
