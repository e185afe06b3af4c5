curl -s localhost:8127/page
