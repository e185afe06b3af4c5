cat title who form blanks "texts/a b.txt"
stat -c %a run.sh
cat /tmp/arguments
curl -s localhost:8128/title
